/* Watches running children: CPU clock, resident memory, idleness; then reaps and judges how each
 * ended. Only the process's own CPU clock makes a time limit, so a busy machine changes no verdict. */
#include "jail.h"

#include <dirent.h>

enum { TICK_MS = 5, START_BOUND_S = 30 };

int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static uint64_t cpu_clock_ns(pid_t pid)
{
    struct timespec used;
    clockid_t clock = ((~(clockid_t)pid) << 3) | 2; /* the process's clock, as in <linux/time.h> */
    return clock_gettime(clock, &used) ? 0 : used.tv_sec * 1000000000ULL + used.tv_nsec;
}

static int read_text(const char *path, char *text, int size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, text, size - 1);
    if (fd >= 0)
        close(fd);
    text[length > 0 ? length : 0] = '\0';
    return length > 0;
}

struct usage {
    char state;
    uint64_t resident_bytes;
    long num_threads;
};

/* From a `stat` file of /proc. Fields 3, 20 and 24; the name in field 2 may hold blanks and
 * parentheses. */
static struct usage read_usage(const char *path)
{
    char text[512];
    struct usage usage = {'?', 0, 0};
    long pages = 0;
    char *fields = read_text(path, text, sizeof text) ? strrchr(text, ')') : NULL;
    if (fields && sscanf(fields, ") %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d "
                                 "%*d %ld %*d %*u %*u %ld", &usage.state, &usage.num_threads,
                         &pages) == 3)
        usage.resident_bytes = pages * (uint64_t)getpagesize();
    return usage;
}

static struct usage usage_of(pid_t pid)
{
    char path[320];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    struct usage usage = read_usage(path);
    if (usage.state != 'Z' || usage.num_threads < 2)
        return usage;
    /* Its main thread has ended and shows no memory any more; the others do. */
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    for (struct dirent *task; tasks && !usage.resident_bytes && (task = readdir(tasks));) {
        snprintf(path, sizeof path, "/proc/%d/task/%s/stat", pid, task->d_name);
        usage.resident_bytes = read_usage(path).resident_bytes;
    }
    if (tasks)
        closedir(tasks);
    return usage;
}

/* Time that the process's threads stood ready and got no core, added up: more than has passed,
 * where several queue at once. */
static uint64_t run_queue_wait_ns(pid_t pid)
{
    char path[320], text[128];
    uint64_t total = 0;
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    for (struct dirent *task; tasks && (task = readdir(tasks));) {
        unsigned long long wait;
        snprintf(path, sizeof path, "/proc/%d/task/%s/schedstat", pid, task->d_name);
        if (task->d_name[0] != '.' && read_text(path, text, sizeof text) &&
            sscanf(text, "%*u %llu", &wait) == 1)
            total += wait;
    }
    if (tasks)
        closedir(tasks);
    return total;
}

/* Whether it can be called idle: some thread sleeps and none stands ready, since a wait for a core
 * is booked only when it ends. A dead program waits for its reaper, which is not its fault. */
static int is_asleep(pid_t pid)
{
    char path[320], text[512];
    int ready = 0, asleep = 0;
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    for (struct dirent *task; tasks && !ready && (task = readdir(tasks));) {
        snprintf(path, sizeof path, "/proc/%d/task/%s/stat", pid, task->d_name);
        char *state = task->d_name[0] != '.' && read_text(path, text, sizeof text)
                          ? strrchr(text, ')') : NULL;
        ready = state && (state[2] == 'R' || state[2] == 'D');
        asleep |= state && strchr("STt", state[2]);
    }
    if (tasks)
        closedir(tasks);
    return asleep && !ready;
}

static void send_kill(struct child *child)
{
    if (child->pidfd >= 0)
        syscall(SYS_pidfd_send_signal, child->pidfd, SIGKILL, NULL, 0);
}

static void kill_child(struct child *child, int why)
{
    if (child->killed_for)
        return;
    child->killed_for = why;
    send_kill(child);
    if (child->limits->profile == COMPILER)
        kill(-child->pid, SIGKILL); /* cc1plus, as and ld share the driver's group */
}

/* We hold a child's ends of the pipes until we know of its end: only then does the other one see an
 * end of file or a broken pipe. So whoever ended because the other did is the second for us too,
 * however late we look. */
void hang_up(struct child *child)
{
    if (!child->talks)
        return;
    close(child->stdin_fd);
    close(child->stdout_fd);
    child->talks = 0;
}

void fail_start(struct child *child, int stage, int error)
{
    hang_up(child);
    child->live = 0;
    child->result->outcome = START_FAILED;
    child->result->stage = stage;
    child->result->code = error;
}

struct slept {
    uint64_t looked_at_ns, seen_ns;
};

/* Of a crossed pair one rightly waits while the other computes, or queues for a core: only time in
 * which neither did counts as idle. Threads that once queued by the dozen have waiting times enough
 * to sleep on for minutes, so sleep is also counted as it is seen. */
static void check_idle(struct child *children, int num_children, struct slept *slept)
{
    const struct program *limits = children[0].limits;
    uint64_t now = now_ns(), wall = now - children[0].started_ns, busy = 0;
    uint64_t unseen = now - slept->looked_at_ns, two_ticks = 2 * TICK_MS * 1000000ULL;
    slept->looked_at_ns = now;
    for (int i = 0; i < num_children; i++) {
        if (children[i].live && !children[i].pid)
            return; /* still being started */
        busy += children[i].live ? cpu_clock_ns(children[i].pid) : children[i].result->cpu_ns;
    }
    if (wall <= busy + limits->idle_ns)
        return;
    int ready = 0;
    for (int i = 0; i < num_children; i++) {
        if (children[i].live) {
            ready |= !is_asleep(children[i].pid); /* before the wait: it may end in between */
            children[i].result->wait_ns = run_queue_wait_ns(children[i].pid);
        }
        busy += children[i].result->wait_ns;
    }
    if (!ready) /* of a long time without a look we know nothing: we may have had no core */
        slept->seen_ns += unseen < two_ticks ? unseen : two_ticks;
    int is_idle = wall > busy + limits->idle_ns || slept->seen_ns > limits->idle_ns;
    int why = !ready && is_idle ? IDLE_LIMIT : WALL_LIMIT;
    for (int i = 0; i < num_children; i++)
        if (children[i].live && (why == IDLE_LIMIT || wall > limits->wall_ns))
            kill_child(&children[i], why);
}

static void check_limits(struct child *child)
{
    const struct program *limits = child->limits;
    uint64_t wall = now_ns() - child->started_ns;
    if (!child->pid) { /* the zygote has not answered yet */
        if (wall > START_BOUND_S * 1000000000ULL)
            stop_zygote();
        return;
    }
    uint64_t cpu = cpu_clock_ns(child->pid);
    struct usage usage = usage_of(child->pid);
    if (usage.resident_bytes > child->result->peak_bytes)
        child->result->peak_bytes = usage.resident_bytes;
    if (limits->profile == COMPILER) { /* a tree of processes: limited by rlimits, metered at the end */
        if (wall > limits->wall_ns)
            kill_child(child, WALL_LIMIT);
        return;
    }
    if (usage.resident_bytes > limits->memory_bytes)
        kill_child(child, MEMORY_LIMIT);
    if (usage.num_threads > MAX_THREADS)
        kill_child(child, THREAD_LIMIT);
    if (cpu > limits->cpu_ns) {
        /* CPU time itself inflates on a contended machine (44 % at most was seen). One who ends
         * between once and 1.5 times the limit is in doubt, and run again alone. */
        child->result->wait_ns = run_queue_wait_ns(child->pid);
        int pressed = limits->under_pressure || child->result->wait_ns > wall / 5;
        if (!pressed || cpu > limits->cpu_ns / 2 * 3)
            kill_child(child, CPU_LIMIT);
    }
}

static void judge_end(struct child *child, int status, uint64_t cpu_ns, uint64_t peak_bytes)
{
    struct result *result = child->result;
    struct stat output;
    int sig = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    child->live = 0;
    result->cpu_ns = cpu_ns;
    result->ended_ns = now_ns();
    hang_up(child);
    result->wall_ns = result->ended_ns - child->started_ns;
    if (peak_bytes > result->peak_bytes)
        result->peak_bytes = peak_bytes;
    if (child->counts_output && fstat(child->stdout_fd, &output) == 0)
        result->output_bytes = output.st_size;
    result->code = sig ? sig : WEXITSTATUS(status);
    if (child->killed_for && child->killed_for != CPU_LIMIT)
        result->outcome = child->killed_for;
    else if (cpu_ns > child->limits->cpu_ns || child->killed_for || sig == SIGXCPU)
        result->outcome = CPU_LIMIT;
    else if (result->peak_bytes > child->limits->memory_bytes)
        result->outcome = MEMORY_LIMIT;
    else if (sig == SIGXFSZ ||
             (child->counts_output && result->output_bytes > child->limits->output_bytes))
        result->outcome = OUTPUT_LIMIT;
    else
        result->outcome = sig ? SIGNALED : EXITED;
}

static uint64_t nanoseconds(struct timeval time)
{
    return time.tv_sec * 1000000000ULL + time.tv_usec * 1000ULL;
}

static void reap(struct child *child)
{
    struct rusage usage;
    int status;
    if (wait4(child->pid, &status, 0, &usage) != child->pid)
        die("wait4");
    close(child->pidfd);
    uint64_t peak = usage.ru_maxrss * 1024ULL;
    judge_end(child, status, nanoseconds(usage.ru_utime) + nanoseconds(usage.ru_stime), peak);
}

static void close_pidfd(struct child *child)
{
    if (child->pidfd >= 0)
        close(child->pidfd);
    child->pidfd = -1;
}

static void lose_zygote(struct child *children, int num_children)
{
    stop_zygote(); /* its children die with it */
    for (int i = 0; i < num_children; i++)
        if (children[i].live && children[i].by_zygote) {
            close_pidfd(&children[i]);
            fail_start(&children[i], 0, ECONNRESET);
        }
}

static void read_zygote(struct child *children, int num_children)
{
    struct zygote_event event;
    char control[CMSG_SPACE(sizeof(int))];
    struct iovec iov = {&event, sizeof event};
    struct msghdr header = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control,
                            .msg_controllen = sizeof control};
    if (recvmsg(jail.zygote_fd, &header, MSG_CMSG_CLOEXEC) != sizeof event ||
        event.id >= (uint32_t)num_children) {
        lose_zygote(children, num_children);
        return;
    }
    struct child *child = &children[event.id];
    struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
    if (event.kind == ZYGOTE_STARTED && rights) {
        child->pid = event.pid;
        child->started_ns = now_ns(); /* the zygote's own waiting is not the program's */
        memcpy(&child->pidfd, CMSG_DATA(rights), sizeof child->pidfd);
        if (child->killed_for) /* cancelled before we knew whom to kill */
            send_kill(child);
    } else if (event.kind == ZYGOTE_EXITED) {
        close_pidfd(child);
        if (child->live) /* not after ZYGOTE_FAILED */
            judge_end(child, event.status, event.cpu_ns, event.peak_bytes);
    } else if (event.kind == ZYGOTE_FAILED) {
        fail_start(child, event.pid, event.status);
    }
}

/* A crossed pair runs only as a pair. */
static int any_failed_to_start(const struct child *children, int num_children)
{
    for (int i = 0; i < num_children; i++)
        if (children[i].result->outcome == START_FAILED ||
            children[i].result->outcome == EXEC_FAILED)
            return 1;
    return 0;
}

/* Returns once the zygote has forked the child, or could not. */
void await_start(struct child *children, int num_children, const struct child *child)
{
    while (child->live && !child->pid) {
        struct pollfd zygote = {jail.zygote_fd, POLLIN, 0};
        if (poll(&zygote, 1, START_BOUND_S * 1000) == 1)
            read_zygote(children, num_children);
        else
            lose_zygote(children, num_children);
    }
}

static int num_live(const struct child *children, int num_children)
{
    int count = 0;
    for (int i = 0; i < num_children; i++)
        count += children[i].live || children[i].pidfd >= 0;
    return count;
}

void supervise(struct child *children, int num_children)
{
    struct slept slept = {0, 0};
    while (num_live(children, num_children)) {
        struct pollfd fds[MAX_PROGRAMS + 2];
        int by_zygote = 0;
        for (int i = 0; i < num_children; i++) {
            int direct = children[i].live && !children[i].by_zygote;
            fds[i] = (struct pollfd){direct ? children[i].pidfd : -1, POLLIN, 0};
            by_zygote |= children[i].by_zygote && (children[i].live || children[i].pidfd >= 0);
        }
        struct pollfd *zygote = &fds[num_children], *control = zygote + 1;
        *zygote = (struct pollfd){by_zygote ? jail.zygote_fd : -1, POLLIN, 0};
        *control = (struct pollfd){jail.control_fd, POLLIN, 0};
        if (poll(fds, num_children + 2, TICK_MS) < 0 && errno != EINTR)
            die("poll");
        for (int i = 0; i < num_children; i++)
            if (fds[i].revents) {
                reap(&children[i]);
                children[i].pidfd = -1;
            }
        if (zygote->revents)
            read_zygote(children, num_children);
        int cancelled = control->revents || any_failed_to_start(children, num_children);
        for (int i = 0; i < num_children; i++) {
            if (children[i].live && cancelled)
                kill_child(&children[i], CANCELLED);
            else if (children[i].live)
                check_limits(&children[i]);
        }
        if (children[0].limits->profile != COMPILER)
            check_idle(children, num_children, &slept);
    }
}
