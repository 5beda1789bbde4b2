/* Linked into every C++ submission. It makes raw system calls and defines no strong name, because
 * submissions name their globals as they like. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

static long system_call(long number, long a, long b, long c, long d)
{
    register long fourth __asm__("r10") = d;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(fourth)
                     : "rcx", "r11", "memory");
    return result;
}

/* The C library has read the soft limit by now, as the size of a thread's stack: many threads fit
 * the address space. The kernel reads it whenever the main thread's stack grows. */
static void deepen_main_stack(void)
{
    struct rlimit limit;
    if (system_call(SYS_prlimit64, 0, RLIMIT_STACK, 0, (long)&limit))
        return;
    limit.rlim_cur = limit.rlim_max;
    system_call(SYS_prlimit64, 0, RLIMIT_STACK, (long)&limit, 0);
}

__attribute__((section(".preinit_array"), used)) static void (*before_constructors)(void) =
    deepen_main_stack;

/* glibc asks newfstatat for the name "", and a filter cannot read names. */
static int status_of(int fd, void *status)
{
    long result = system_call(SYS_fstat, fd, (long)status, 0, 0);
    if (!result)
        return 0;
    errno = -result;
    return -1;
}

__attribute__((weak)) int fstat(int fd, struct stat *status)
{
    return status_of(fd, status);
}

__attribute__((weak)) int fstat64(int fd, struct stat64 *status)
{
    return status_of(fd, status); /* the same layout on x86-64 */
}
