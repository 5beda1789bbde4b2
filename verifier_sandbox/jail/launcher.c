/* The launcher of one slot: clones, limits, filters and executes programs, meters and reaps them.
 *
 *     launcher CONTROL_FD OUTPUT_FD UID BPF_FD:LANDLOCK_FD... -- INTERPRETER ARGUMENT...
 *
 * One request at a time arrives on the control socket. It must stay small: a cloned child starts
 * with the peak memory of its parent. UID -1 keeps the identity; LANDLOCK_FD -1 skips Landlock.
 */
#include "jail.h"

struct jail jail;

static struct result results[MAX_TESTS * MAX_PROGRAMS];
static union {
    struct request header;
    char bytes[96 << 10];
} message;

static void keep_low_descriptors_busy(void)
{
    jail.null_fd = move_up(open("/dev/null", O_RDWR | O_CLOEXEC));
    for (int fd = 0; fd < FIRST_OWN_FD; fd++)
        if (fcntl(fd, F_GETFD) < 0)
            dup3(jail.null_fd, fd, O_CLOEXEC);
}

static void read_filter(struct profile_state *profile, int fd)
{
    ssize_t size = pread(fd, profile->filter, sizeof profile->filter, 0);
    if (size <= 0 || size % sizeof(struct sock_filter))
        die("filter");
    profile->length = size / sizeof(struct sock_filter);
    close(fd);
}

static void configure(int argc, char **argv)
{
    if (argc < 4 + NUM_PROFILES + 1)
        die("usage");
    jail.control_fd = move_up(atoi(argv[1]));
    jail.output_fd = move_up(atoi(argv[2]));
    jail.uid = atoi(argv[3]);
    for (int i = 0; i < NUM_PROFILES; i++) {
        char *landlock = strchr(argv[4 + i], ':');
        if (!landlock)
            die("profile");
        read_filter(&jail.profiles[i], atoi(argv[4 + i]));
        int fd = atoi(landlock + 1);
        jail.profiles[i].landlock_fd = fd < 0 ? -1 : move_up(fd);
    }
    jail.interpreter = argv + 4 + NUM_PROFILES + 1;
    jail.pid = getpid();
    keep_low_descriptors_busy();
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); /* our descriptors hold the tests */
    prctl(PR_SET_NAME, "jail-launcher", 0, 0, 0);
    if (chdir("/") < 0)
        die("chdir");
    /* Inherited by every child. */
    if (set_limits(RLIMIT_STACK, THREAD_STACK_BYTES, MAX_STACK_BYTES) ||
        set_limit(RLIMIT_CORE, 0) || set_limit(RLIMIT_MEMLOCK, 0) || set_limit(RLIMIT_MSGQUEUE, 0))
        die("limits");
    if (jail.uid >= 0 && (syscall(SYS_setgroups, 0, NULL) ||
                          syscall(SYS_setresgid, jail.uid, jail.uid, jail.uid)))
        die("groups");
}

/* Receives one request and its descriptors; -1 when the service has gone. */
static ssize_t receive(int *fds, int max_fds, int *num_fds)
{
    char control[CMSG_SPACE(sizeof(int) * 8)];
    struct iovec iov = {message.bytes, sizeof message.bytes - 1};
    struct msghdr header = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control,
                            .msg_controllen = sizeof control};
    ssize_t size = recvmsg(jail.control_fd, &header, MSG_CMSG_CLOEXEC);
    *num_fds = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&header); c; c = CMSG_NXTHDR(&header, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        int count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (int i = 0; i < count && *num_fds < max_fds; i++)
            memcpy(&fds[(*num_fds)++], CMSG_DATA(c) + i * sizeof(int), sizeof(int));
    }
    return size <= 0 ? -1 : size;
}

static void answer(int num_results, int num_programs)
{
    struct reply reply = {num_results, num_programs};
    struct iovec iov[2] = {{&reply, sizeof reply},
                           {results, sizeof results[0] * num_results * num_programs}};
    struct msghdr header = {.msg_iov = iov, .msg_iovlen = 2};
    if (sendmsg(jail.control_fd, &header, MSG_NOSIGNAL) < 0)
        exit(0);
}

/* Runs the tests in order up to the first that the service must look at. */
static void run_tests(const struct request *request, const int *fds)
{
    const struct test *tests = (const struct test *)(request + 1);
    int num_programs = request->num_programs, done = 0;
    while (done < (int)request->num_tests) {
        struct result *result = &results[done * num_programs];
        const struct test *test = &tests[done++];
        run_test(request, test, fds, result);
        if (result->outcome != EXITED || result->code != 0 || num_programs > 1)
            break;
        result->matched = request->compare != COMPARE_NEVER &&
                          same_output(fds[num_programs], &test->expected, result->output_bytes,
                                      request->compare);
        if (!result->matched)
            break;
    }
    answer(done, num_programs);
}

static void compile(struct request *request, ssize_t size)
{
    char *strings[128], *at = message.bytes + sizeof *request, *end = message.bytes + size;
    int count = request->num_arguments + request->num_variables + 2, variables_at = 0;
    if (count > 128)
        die("too many compiler arguments");
    *end = '\0';
    for (int i = 0; i < count; i++) {
        if (i == (int)request->num_arguments || i == count - 1) {
            strings[i] = NULL;
            variables_at = i < count - 1 ? i + 1 : variables_at;
            continue;
        }
        strings[i] = at < end ? at : end;
        at += strlen(strings[i]) + 1;
    }
    run_compiler(&request->programs[0], strings, strings + variables_at, &results[0]);
    answer(1, 1);
}

/* As sub-reaper we inherit what a dead zygote leaves. */
static void reap_orphans(void)
{
    for (pid_t pid; (pid = waitpid(-1, NULL, WNOHANG)) > 0;)
        if (pid == jail.zygote_pid) {
            close(jail.zygote_fd);
            jail.zygote_pid = 0;
        }
}

int main(int argc, char **argv)
{
    configure(argc, argv);
    for (;;) {
        int fds[8], num_fds;
        ssize_t size = receive(fds, 8, &num_fds);
        if (size < 0)
            return 0;
        struct request *request = &message.header;
        memset(results, 0, sizeof results[0] * MAX_PROGRAMS);
        if ((size_t)size < sizeof *request)
            continue; /* a cancellation that came too late */
        if (request->operation == OP_COMPILE) {
            compile(request, size);
        } else if (request->operation == OP_RUN && request->num_programs >= 1 &&
                   request->num_programs <= MAX_PROGRAMS && request->num_tests <= MAX_TESTS &&
                   num_fds == (int)request->num_programs + 1 &&
                   size == (ssize_t)(sizeof *request + request->num_tests * sizeof(struct test))) {
            memset(results, 0, sizeof results[0] * request->num_tests * request->num_programs);
            run_tests(request, fds);
        } else {
            die("malformed request");
        }
        for (int i = 0; i < num_fds; i++)
            close(fds[i]);
        reap_orphans();
    }
}
