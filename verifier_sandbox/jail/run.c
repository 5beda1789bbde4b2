/* One test, one compilation: descriptors in, children out. */
#include "jail.h"

static char buffers[2][64 << 10];

void die(const char *what)
{
    dprintf(2, "jail-launcher: %s: %s\n", what, strerror(errno));
    exit(1);
}

int move_up(int fd)
{
    int moved = fd < 0 || fd >= FIRST_OWN_FD ? fd : fcntl(fd, F_DUPFD_CLOEXEC, FIRST_OWN_FD);
    if (moved < 0)
        die("descriptor");
    if (moved != fd)
        close(fd);
    else
        fcntl(fd, F_SETFD, FD_CLOEXEC);
    return moved;
}

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* The same file for reading alone. Of one that could be written the kernels before 6.7 refuse a
 * shared mapping, sealed or not, and fast readers map their input. */
static int read_only(int fd)
{
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int reopened = open(path, O_RDONLY | O_CLOEXEC);
    if (reopened < 0)
        die("reopening an input");
    close(fd);
    return reopened;
}

/* A sealed file of the span, or -1 where it is absent. */
static int sealed_copy(int blob, const struct span *span)
{
    if (span->offset == UINT64_MAX)
        return -1;
    int fd = memfd_create("input", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        die("memfd_create");
    for (uint64_t done = 0; done < span->length;) {
        uint64_t left = span->length - done;
        size_t wanted = left < sizeof buffers[0] ? left : sizeof buffers[0];
        ssize_t got = pread(blob, buffers[0], wanted, span->offset + done);
        if (got <= 0 || pwrite(fd, buffers[0], got, done) != got)
            die("copying an input");
        done += got;
    }
    fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL);
    return read_only(fd);
}

static uint64_t trimmed_length(int fd, uint64_t offset, uint64_t length)
{
    while (length) {
        uint64_t piece = length < 4096 ? length : 4096;
        ssize_t got = pread(fd, buffers[0], piece, offset + length - piece);
        if (got != (ssize_t)piece)
            return length;
        while (piece && strchr(" \n\r\t\v\f", buffers[0][piece - 1]) && buffers[0][piece - 1]) {
            piece--;
            length--;
        }
        if (piece)
            break;
    }
    return length;
}

int same_output(int blob, const struct span *expected, uint64_t output_bytes, int mode)
{
    uint64_t length = output_bytes, wanted = expected->length;
    if (mode == COMPARE_TRIMMED) {
        length = trimmed_length(jail.output_fd, 0, length);
        wanted = trimmed_length(blob, expected->offset, wanted);
    }
    if (length != wanted)
        return 0;
    for (uint64_t done = 0; done < length;) {
        size_t piece = length - done < sizeof buffers[0] ? length - done : sizeof buffers[0];
        if (pread(jail.output_fd, buffers[0], piece, done) != (ssize_t)piece ||
            pread(blob, buffers[1], piece, expected->offset + done) != (ssize_t)piece ||
            memcmp(buffers[0], buffers[1], piece))
            return 0;
        done += piece;
    }
    return 1;
}

static void empty_output(void)
{
    if (ftruncate(jail.output_fd, 0) < 0 || lseek(jail.output_fd, 0, SEEK_SET) < 0)
        die("output file");
}

static int start(struct child *child, uint32_t id)
{
    return child->limits->profile == PYTHON ? start_by_zygote(child, id) : start_child(child);
}

/* Two programs talk over crossed pipes; the first is the submission, the second the interactor. */
static void cross_pipes(struct child *children)
{
    for (int i = 0; i < 2; i++) {
        int ends[2];
        if (pipe2(ends, O_CLOEXEC) < 0)
            die("pipe");
        children[i].stdout_fd = ends[1];
        children[1 - i].stdin_fd = ends[0];
        children[i].talks = 1;
    }
}

/* The submission last: whatever it does to the limits of their user id, the helper is there. */
static void start_all(struct child *children, int count)
{
    int started = 1;
    for (int i = count - 1; i >= 0; i--) {
        if (!started) {
            children[i].result->outcome = CANCELLED;
            continue;
        }
        started = start(&children[i], i);
        if (i > 0)
            await_start(children, count, &children[i]);
        started &= children[i].result->outcome != START_FAILED;
    }
}

void run_test(const struct request *request, const struct test *test, const int *fds,
              struct result *result)
{
    struct child children[MAX_PROGRAMS];
    int count = request->num_programs, last = count - 1, blob = fds[count], aux[NUM_AUX];
    int input = sealed_copy(blob, &test->input);
    empty_output();
    for (int i = 0; i < NUM_AUX; i++)
        aux[i] = sealed_copy(blob, &test->aux[i]);
    for (int i = 0; i < count; i++)
        children[i] = (struct child){
            .limits = &request->programs[i], .result = &result[i], .program_fd = fds[i],
            .stdin_fd = input >= 0 ? input : jail.null_fd, .stdout_fd = jail.output_fd,
            .counts_output = count == 1, .pidfd = -1,
            .aux_fd = {i == last ? aux[0] : -1, i == last ? aux[1] : -1}};
    if (count == 2)
        cross_pipes(children);
    start_all(children, count);
    supervise(children, count);
    for (int i = 0; i < count; i++)
        hang_up(&children[i]);
    close_fd(&input);
    for (int i = 0; i < NUM_AUX; i++)
        close_fd(&aux[i]);
}

void run_compiler(const struct program *limits, char **argv, char **environment,
                  struct result *result)
{
    struct child child = {.limits = limits, .result = result, .stdin_fd = jail.null_fd,
                          .stdout_fd = jail.output_fd, .aux_fd = {-1, -1}, .program_fd = -1,
                          .argv = argv, .environment = environment, .pidfd = -1,
                          .counts_output = 1};
    empty_output();
    if (start_child(&child))
        supervise(&child, 1);
    if (child.pid > 1) { /* what the driver left behind, if it was killed */
        kill(-child.pid, SIGKILL);
        while (waitpid(-child.pid, NULL, 0) > 0)
            ;
    }
}
