/* Shared by the launcher's parts: launcher.c (requests), confine.c (what a child gives up),
 * supervise.c (limits while it runs), run.c (tests, compilations, the Python zygote). */
#ifndef VERIFIER_SANDBOX_JAIL_H
#define VERIFIER_SANDBOX_JAIL_H

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "wire.h"

enum {
    FIRST_OWN_FD = 10,    /* lower numbers are for children: 0-2, and 3-4 for aux files */
    EXECUTABLE_FD = 63,   /* as in policies.py: above a child's RLIMIT_NOFILE */
    MAX_INSTRUCTIONS = 4096,
    OWN_PID = 0x7F0D1E57, /* as in bpf.py */
    MAX_THREADS = 128,    /* of one program */
    THREAD_STACK_BYTES = 8 << 20, /* what C libraries give a thread unless a program asks */
    MAX_STACK_BYTES = 256 << 20,  /* what the main thread may grow to */
};

struct profile_state {
    struct sock_filter filter[MAX_INSTRUCTIONS];
    int length, landlock_fd;
};

struct jail {
    struct profile_state profiles[NUM_PROFILES];
    int control_fd, output_fd, null_fd, uid;
    pid_t pid;
    char **interpreter;
    pid_t zygote_pid; /* 0: not started */
    int zygote_fd;
};
extern struct jail jail;

/* A program being started or running. */
struct child {
    const struct program *limits;
    struct result *result;
    int stdin_fd, stdout_fd, aux_fd[NUM_AUX], program_fd; /* -1: absent */
    int counts_output; /* stdout is a file whose size is limited */
    int talks; /* its stdin and stdout are pipes to another child, and ours to close */
    char **argv, **environment; /* compiler only */
    pid_t pid; /* 0: not yet known (zygote) */
    int pidfd;
    int live, by_zygote, killed_for;
    int64_t started_ns;
    volatile int failed_stage, failed_errno; /* written by the vforked child */
};

int64_t now_ns(void);
int move_up(int fd);
void die(const char *what) __attribute__((noreturn));

/* confine.c */
int set_limits(int resource, uint64_t soft, uint64_t hard);
int set_limit(int resource, uint64_t value); /* soft and hard */
int start_child(struct child *child); /* false: its result says why */
int start_zygote(void);
void stop_zygote(void);
int start_by_zygote(struct child *child, uint32_t id);

/* supervise.c: returns when every child has ended and been reaped. */
void supervise(struct child *children, int num_children);
void await_start(struct child *children, int num_children, const struct child *child);
void fail_start(struct child *child, int stage, int error);
void hang_up(struct child *child);

/* run.c */
void run_test(const struct request *, const struct test *, const int *fds, struct result *);
void run_compiler(const struct program *, char **argv, char **environment, struct result *);
int same_output(int blob, const struct span *expected, uint64_t output_bytes, int mode);

#endif
