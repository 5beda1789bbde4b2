/* What a child gives up between clone and exec. The child shares our memory until it execs, so it
 * makes raw system calls only and reports a failure by writing into `struct child`. */
#include "jail.h"

#include <linux/capability.h>

#ifndef SYS_landlock_restrict_self
#define SYS_landlock_restrict_self 446
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#ifndef CLOSE_RANGE_CLOEXEC
#define CLOSE_RANGE_CLOEXEC (1U << 2)
#endif

enum stage { IDENTITY = 1, DESCRIPTORS, LIMITS, PARENT, NO_NEW_PRIVS, LANDLOCK, SECCOMP, EXEC, CLONE,
             ZYGOTE };

static const uint64_t ADDRESS_SPACE_BYTES = 4ULL << 30;
static char child_stack[64 << 10] __attribute__((aligned(16)));
static char *program_argv[] = {"solution", NULL};
/* LANG=C is the one locale that a static program can load, as std::locale("") does. Every arena of
 * malloc reserves 64 MiB of address space, and the default is eight a core. */
static char *program_environment[] = {"PATH=/usr/bin:/bin", "LANG=C", "HOME=/",
                                      "MALLOC_ARENA_MAX=8", NULL};
static char *python_environment[] = {"PATH=/usr/bin:/bin", "LANG=C.UTF-8", "HOME=/",
                                     "MALLOC_ARENA_MAX=8", "PYTHONHASHSEED=0",
                                     "OMP_NUM_THREADS=1",  "OPENBLAS_NUM_THREADS=1", NULL};

struct launch {
    struct child *child;
    enum profile profile;
    int is_zygote, zygote_socket;
};

static rlim_t smaller(uint64_t value, rlim_t highest)
{
    return value < highest ? value : highest;
}

/* Limits only ever go down: a container may have set lower ones. */
int set_limits(int resource, uint64_t soft, uint64_t hard)
{
    static rlim_t highest[RLIM_NLIMITS];
    struct rlimit limit;
    if (!highest[resource]) {
        if (getrlimit(resource, &limit) < 0)
            return -1;
        highest[resource] = limit.rlim_max;
    }
    limit.rlim_cur = smaller(soft, highest[resource]);
    limit.rlim_max = smaller(hard, highest[resource]);
    return setrlimit(resource, &limit);
}

int set_limit(int resource, uint64_t value)
{
    return set_limits(resource, value, value);
}

/* The kernel counts tasks per user id. Every program may have its threads, whatever others under
 * the same id do: a submission that could starve its interactor would choose its own verdict. */
static uint64_t max_tasks(const struct child *child)
{
    int is_helper = child->aux_fd[0] >= 0;
    return (1 + is_helper) * MAX_THREADS;
}

/* Backstops only: the exact limits are the process's CPU clock and its resident memory.
 * RLIMIT_STACK, which the launcher set on itself, is low when the C library reads it to size the
 * stacks of threads; startup.c and the zygote then raise it for the main thread. */
static int limit_resources(const struct launch *launch)
{
    const struct program *limits = launch->is_zygote ? NULL : launch->child->limits;
    int compiling = launch->profile == COMPILER;
    uint64_t space = compiling ? limits->memory_bytes : ADDRESS_SPACE_BYTES;
    if (set_limit(RLIMIT_AS, space) || set_limit(RLIMIT_NOFILE, EXECUTABLE_FD))
        return -1;
    if (compiling && set_limit(RLIMIT_STACK, MAX_STACK_BYTES))
        return -1;
    /* Only an identity of our own can be capped: the other is shared with the whole machine. */
    uint64_t tasks = launch->is_zygote ? 3 * MAX_THREADS : max_tasks(launch->child);
    if (jail.uid >= 0 && set_limit(RLIMIT_NPROC, tasks))
        return -1;
    if (!limits)
        return 0;
    /* Tick accounting fires up to 11 % early, and a program under pressure may run to 1.5 times. */
    uint64_t cpu_s = limits->cpu_ns / 1000000000;
    cpu_s = compiling ? cpu_s + cpu_s / 8 + 1 : cpu_s * 3 / 2 + 3;
    return set_limit(RLIMIT_CPU, cpu_s) || set_limit(RLIMIT_FSIZE, limits->output_bytes + 1);
}

static int become_slot_user(void)
{
    if (jail.uid < 0)
        return 0;
    return syscall(SYS_setresuid, jail.uid, jail.uid, jail.uid);
}

/* An identity of our own has no capabilities; ours may. Dropping them needs no privilege, and
 * no_new_privs keeps exec from giving them back. */
static int drop_capabilities(void)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = {{0}};
    return jail.uid < 0 && syscall(SYS_capset, &header, none);
}

static int place(int fd, int number)
{
    return fd < 0 ? 0 : syscall(SYS_dup3, fd, number, 0) < 0;
}

static int place_descriptors(const struct launch *launch)
{
    const struct child *child = launch->child;
    if (launch->is_zygote)
        return place(jail.null_fd, 0) || place(jail.null_fd, 1) || place(jail.null_fd, 2) ||
               place(launch->zygote_socket, 3) ||
               place(jail.profiles[PYTHON].landlock_fd, 4);
    int compiling = launch->profile == COMPILER;
    if (place(child->stdin_fd, 0) || place(child->stdout_fd, 1) ||
        place(compiling ? child->stdout_fd : jail.null_fd, 2) || place(child->aux_fd[0], 3) ||
        place(child->aux_fd[1], 4))
        return -1;
    return !compiling && syscall(SYS_dup3, child->program_fd, EXECUTABLE_FD, O_CLOEXEC) < 0;
}

static int install_filter(struct profile_state *profile)
{
    pid_t self = syscall(SYS_getpid);
    struct sock_filter code[profile->length];
    memcpy(code, profile->filter, sizeof code);
    for (int i = 0; i < profile->length; i++)
        if (code[i].k == OWN_PID)
            code[i].k = self;
    struct sock_fprog program = {profile->length, code};
    return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, &program);
}

static enum stage confine(const struct launch *launch)
{
    struct profile_state *profile = &jail.profiles[launch->profile];
    if (launch->profile == COMPILER) /* a group, to be killed together */
        syscall(SYS_setpgid, 0, 0);
    if (place_descriptors(launch))
        return DESCRIPTORS;
    /* Everything of ours is close-on-exec already; this covers what we may have forgotten. */
    int first = launch->is_zygote ? 5 : 3 + (launch->child->aux_fd[0] >= 0 ? NUM_AUX : 0);
    if (syscall(SYS_close_range, first, ~0U, CLOSE_RANGE_CLOEXEC) < 0 && errno != ENOSYS)
        return DESCRIPTORS;
    if (limit_resources(launch))
        return LIMITS;
    if (become_slot_user() || drop_capabilities())
        return IDENTITY;
    /* After the change of identity, which clears it. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) || syscall(SYS_getppid) != jail.pid)
        return PARENT;
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        return NO_NEW_PRIVS;
    if (profile->landlock_fd >= 0 &&
        syscall(SYS_landlock_restrict_self, profile->landlock_fd, 0))
        return LANDLOCK;
    /* The zygote must fork; it filters each child before the submission runs. */
    if (!launch->is_zygote && install_filter(profile))
        return SECCOMP;
    return 0;
}

static int child_main(void *argument)
{
    struct launch *launch = argument;
    struct child *child = launch->child;
    enum stage stage = confine(launch);
    if (!stage) {
        if (launch->is_zygote)
            execve(jail.interpreter[0], jail.interpreter, python_environment);
        else if (launch->profile == COMPILER)
            execve(child->argv[0], child->argv, child->environment);
        else
            syscall(SYS_execveat, EXECUTABLE_FD, "", program_argv, program_environment,
                    AT_EMPTY_PATH);
        stage = EXEC;
    }
    child->failed_errno = errno;
    child->failed_stage = stage;
    _exit(127);
}

/* Whether exec failed for what is in the binary: a foreign interpreter, absurd segments. The
 * submission wrote that. Full tables of the kernel are the machine's. */
static int is_fault_of_program(const struct launch *launch)
{
    const struct child *child = launch->child;
    int is_program = !launch->is_zygote && launch->profile != COMPILER;
    return is_program && child->failed_stage == EXEC && child->failed_errno != EAGAIN &&
           child->failed_errno != ENFILE;
}

static int clone_child(struct launch *launch)
{
    struct child *child = launch->child;
    child->failed_stage = 0;
    child->started_ns = now_ns();
    child->pid = clone(child_main, child_stack + sizeof child_stack,
                       CLONE_VM | CLONE_VFORK | CLONE_PIDFD | SIGCHLD, launch, &child->pidfd);
    if (child->pid < 0) {
        child->pidfd = -1;
        fail_start(child, CLONE, errno);
        return 0;
    }
    if (child->failed_stage) {
        waitpid(child->pid, NULL, 0);
        close(child->pidfd);
        child->pidfd = -1;
        fail_start(child, child->failed_stage, child->failed_errno);
        if (is_fault_of_program(launch))
            child->result->outcome = EXEC_FAILED;
        return 0;
    }
    return child->live = 1;
}

int start_child(struct child *child)
{
    struct launch launch = {child, child->limits->profile, 0, -1};
    return clone_child(&launch);
}

void stop_zygote(void)
{
    if (!jail.zygote_pid)
        return;
    kill(jail.zygote_pid, SIGKILL);
    waitpid(jail.zygote_pid, NULL, 0);
    close(jail.zygote_fd);
    jail.zygote_pid = 0;
}

/* Starts the interpreter, hands it the filter for its children and waits until it is ready. */
int start_zygote(void)
{
    int pair[2];
    struct result ignored;
    struct child child = {.result = &ignored, .pidfd = -1};
    struct zygote_event event;
    if (jail.zygote_pid)
        return 1;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        return 0;
    struct launch launch = {&child, PYTHON, 1, pair[1]};
    int started = clone_child(&launch);
    close(pair[1]);
    if (!started) {
        close(pair[0]);
        errno = ignored.code;
        return 0;
    }
    close(child.pidfd);
    jail.zygote_pid = child.pid;
    jail.zygote_fd = pair[0];
    struct profile_state *profile = &jail.profiles[PYTHON];
    struct pollfd ready = {jail.zygote_fd, POLLIN, 0};
    if (send(jail.zygote_fd, profile->filter, profile->length * sizeof profile->filter[0],
             MSG_NOSIGNAL) < 0 ||
        poll(&ready, 1, 120000) != 1 || recv(jail.zygote_fd, &event, sizeof event, 0) <= 0 ||
        event.kind != ZYGOTE_READY) {
        stop_zygote();
        errno = ETIMEDOUT;
        return 0;
    }
    return 1;
}

int start_by_zygote(struct child *child, uint32_t id)
{
    struct zygote_run run = {id, child->limits->cpu_ns / 1000000000 * 3 / 2 + 3,
                             child->limits->output_bytes + 1,
                             jail.uid >= 0 ? max_tasks(child) : 0};
    int fds[3 + NUM_AUX] = {child->program_fd, child->stdin_fd, child->stdout_fd,
                            child->aux_fd[0], child->aux_fd[1]};
    int num_fds = child->aux_fd[0] >= 0 ? 5 : 3;
    char control[CMSG_SPACE(sizeof fds)];
    struct iovec iov = {&run, sizeof run};
    struct msghdr header = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control,
                            .msg_controllen = CMSG_SPACE(sizeof(int) * num_fds)};
    struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int) * num_fds);
    memcpy(CMSG_DATA(rights), fds, sizeof(int) * num_fds);
    child->by_zygote = 1;
    child->pid = 0;
    child->pidfd = -1;
    child->started_ns = now_ns();
    if (!start_zygote() || sendmsg(jail.zygote_fd, &header, MSG_NOSIGNAL) < 0) {
        fail_start(child, ZYGOTE, errno);
        stop_zygote();
        return 0;
    }
    return child->live = 1;
}
