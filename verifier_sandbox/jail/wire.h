/* What the service and the launcher say to each other; `wire.py` packs the same layout. */
#ifndef VERIFIER_SANDBOX_WIRE_H
#define VERIFIER_SANDBOX_WIRE_H

#include <stdint.h>

enum { MAX_PROGRAMS = 2, MAX_TESTS = 256, NUM_AUX = 2 };

enum operation { OP_RUN = 1, OP_COMPILE = 2 };

enum profile { CPP_STATIC, CPP_DYNAMIC, PYTHON, COMPILER, NUM_PROFILES };

/* How the launcher itself compares standard output; it stops at the first difference. */
enum compare { COMPARE_NEVER, COMPARE_EXACT, COMPARE_TRIMMED };

enum outcome {
    EXITED = 1,   /* code: exit status */
    SIGNALED,     /* code: signal */
    CPU_LIMIT,
    IDLE_LIMIT,   /* slept away the time: neither ran nor waited for a core */
    MEMORY_LIMIT,
    OUTPUT_LIMIT,
    WALL_LIMIT,   /* the machine never gave it the time: no verdict */
    START_FAILED, /* code: errno, stage: where */
    CANCELLED,
    THREAD_LIMIT,
    EXEC_FAILED,  /* code: errno; the kernel refused the binary itself */
};

struct program {
    uint32_t profile;
    uint32_t under_pressure; /* let it run past the limit, so that a re-run can tell */
    uint64_t cpu_ns, idle_ns, wall_ns, memory_bytes, output_bytes;
};

struct span {
    uint64_t offset, length; /* in the blob; offset UINT64_MAX: absent */
};

struct test {
    struct span input, expected, aux[NUM_AUX]; /* aux: descriptors 3 and 4 of the last program */
};

/* Followed by num_tests tests (OP_RUN) or by NUL-terminated strings, argv then environment
 * (OP_COMPILE). Descriptors: one per program (OP_RUN), then the blob. */
struct request {
    uint32_t operation, num_programs, num_tests, compare;
    uint32_t num_arguments, num_variables;
    struct program programs[MAX_PROGRAMS];
};

struct result {
    uint32_t outcome;
    int32_t code;
    uint32_t stage, matched;
    uint64_t cpu_ns, wall_ns, wait_ns, peak_bytes, output_bytes;
    uint64_t ended_ns; /* monotonic: tells who of a pair ended first */
};

/* Followed by num_results groups of num_programs results. */
struct reply {
    uint32_t num_results, num_programs;
};

/* Launcher and zygote. A run carries the source, stdin, stdout and any aux descriptors. */
struct zygote_run {
    uint32_t id, cpu_s;
    uint64_t output_bytes, max_tasks; /* max_tasks 0: no limit */
};

enum zygote_event_kind { ZYGOTE_READY = 1, ZYGOTE_STARTED, ZYGOTE_EXITED, ZYGOTE_FAILED };

struct zygote_event {
    uint32_t kind, id;
    int32_t pid, status; /* status as from wait4, or errno */
    uint64_t cpu_ns, peak_bytes;
};

#endif
