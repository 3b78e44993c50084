// A library for LD_PRELOAD on Linux. With it, each reading of the date and time is about an hour before the previous one. The monotonic clock is not
// changed.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <sys/time.h>
#include <time.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static time_t back(void) {
    static atomic_long readings;
    return 3600 * ++readings;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int result = REAL(clock_gettime)(clock, time);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) time->tv_sec -= back();
    return result;
}

int gettimeofday(struct timeval *time, void *zone) {
    int result = REAL(gettimeofday)(time, zone);
    time->tv_sec -= back();
    return result;
}

time_t time(time_t *result) {
    time_t now = REAL(time)(NULL) - back();
    if (result) *result = now;
    return now;
}
