// A library for LD_PRELOAD on Linux that makes system calls fail. It counts the calls that write, truncate, synchronize, rename, remove or make files
// or folders below FAULTS_UNDER. At call number FAULTS_AT, it does what FAULTS_KIND says. At exit, it writes the number of calls to the file
// FAULTS_COUNT. `statvfs` reports FAULTS_FREE bytes free.
//
//     full       this call and all later ones fail with ENOSPC if they need space
//     crash      the process is killed
//     power      the process is killed; half of each file's unsynchronized end is lost, or that end becomes zeros
//     interrupt  the process gets SIGINT

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define MOST 4096

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int calls;
static struct { char path[PATH_MAX]; off_t safe; } files[MOST];  // what was written and not synchronized since
static int known;

static int is_below(const char *path) {
    const char *under = getenv("FAULTS_UNDER");
    return under && strncmp(path, under, strlen(under)) == 0;
}

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

static int find(const char *path) {
    for (int i = 0; i < known; i++)
        if (strcmp(files[i].path, path) == 0) return i;
    return -1;
}

static void lose(void) {
    for (int i = 0; i < known; i++) {
        int fd = REAL(open)(files[i].path, O_WRONLY);
        struct stat status;
        if (fd < 0 || fstat(fd, &status) != 0 || status.st_size <= files[i].safe) continue;
        if (calls % 2) {
            REAL(ftruncate)(fd, files[i].safe + (status.st_size - files[i].safe) / 2);
        } else {
            char *zeros = calloc(1, status.st_size - files[i].safe);
            if (REAL(pwrite)(fd, zeros, status.st_size - files[i].safe, files[i].safe) < 0) abort();
        }
        close(fd);
    }
}

static int fails(int needs_room) {
    const char *at = getenv("FAULTS_AT"), *kind = getenv("FAULTS_KIND");
    int number = ++calls;
    if (!at || !kind || number < atoi(at)) return 0;
    if (strcmp(kind, "full") == 0) {
        errno = ENOSPC;
        return needs_room;
    }
    if (strcmp(kind, "interrupt") == 0) {
        if (number == atoi(at)) raise(SIGINT);
        return 0;
    }
    if (strcmp(kind, "power") == 0) lose();
    kill(getpid(), SIGKILL);
    return 0;
}

static int fails_on(int fd, int needs_room) {
    char path[PATH_MAX];
    if (!path_of(fd, path)) return 0;
    pthread_mutex_lock(&lock);
    int failed = fails(needs_room);
    struct stat status;
    if (!failed && needs_room && find(path) < 0 && known < MOST && fstat(fd, &status) == 0) {
        strcpy(files[known].path, path);
        files[known++].safe = status.st_size;
    }
    pthread_mutex_unlock(&lock);
    return failed;
}

ssize_t write(int fd, const void *data, size_t count) {
    return fails_on(fd, 1) ? -1 : REAL(write)(fd, data, count);
}

ssize_t pwrite(int fd, const void *data, size_t count, off_t offset) {
    return fails_on(fd, 1) ? -1 : REAL(pwrite)(fd, data, count, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t count, off64_t offset) {
    return fails_on(fd, 1) ? -1 : REAL(pwrite64)(fd, data, count, offset);
}

int ftruncate(int fd, off_t length) { return fails_on(fd, 0) ? -1 : REAL(ftruncate)(fd, length); }

int ftruncate64(int fd, off64_t length) { return fails_on(fd, 0) ? -1 : REAL(ftruncate64)(fd, length); }

int fsync(int fd) {
    if (fails_on(fd, 0)) return -1;
    char path[PATH_MAX];
    if (path_of(fd, path)) {
        pthread_mutex_lock(&lock);
        int file = find(path);
        if (file >= 0) files[file] = files[--known];
        pthread_mutex_unlock(&lock);
    }
    return REAL(fsync)(fd);
}

int rename(const char *from, const char *to) {
    if (is_below(from)) {
        pthread_mutex_lock(&lock);
        int failed = fails(0), old = find(to);
        if (old >= 0) files[old] = files[--known];
        int file = find(from);
        if (file >= 0) strcpy(files[file].path, to);
        pthread_mutex_unlock(&lock);
        if (failed) return -1;
    }
    return REAL(rename)(from, to);
}

int unlink(const char *path) {
    if (is_below(path)) {
        pthread_mutex_lock(&lock);
        fails(0);
        int file = find(path);
        if (file >= 0) files[file] = files[--known];
        pthread_mutex_unlock(&lock);
    }
    return REAL(unlink)(path);
}

int mkdir(const char *path, mode_t mode) {
    if (is_below(path)) {
        pthread_mutex_lock(&lock);
        int failed = fails(1);
        pthread_mutex_unlock(&lock);
        if (failed) return -1;
    }
    return REAL(mkdir)(path, mode);
}

int statvfs(const char *path, struct statvfs *disk) {
    const char *free = getenv("FAULTS_FREE");
    int status = REAL(statvfs)(path, disk);
    if (free && status == 0) disk->f_bfree = disk->f_bavail = atoll(free) / disk->f_frsize;
    return status;
}

static void tell(void) {
    const char *path = getenv("FAULTS_COUNT");
    if (!path) return;
    FILE *file = fopen(path, "w");
    if (file) {
        fprintf(file, "%d", calls);
        fclose(file);
    }
}

__attribute__((destructor)) static void tell_at_exit(void) { tell(); }

__attribute__((noreturn)) void _exit(int status) {
    tell();
    REAL(_exit)(status);
    __builtin_unreachable();
}
