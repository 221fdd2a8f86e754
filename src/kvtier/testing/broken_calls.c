/* Makes calls on files below a directory fail or hang, as a control file says. Preloaded into a
 * process (LD_PRELOAD), so that what runs above it is unchanged. See broken_medium.py.
 *
 * A line of the control file is `<group> <errno>`, `<group> hang` or `names <length>`; groups are
 * open create read write stat fstat sync rename unlink mkdir list lock touch statvfs, and `all`.
 * It is read at every call, and again while a call hangs: removing the line lets it go on.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static const char *below, *control;

__attribute__((constructor)) static void start(void) {
    below = getenv("KVTIER_BROKEN_BELOW");
    control = getenv("KVTIER_BROKEN_CONTROL");
}

/* By system calls, since the functions are the ones below. */
static long load(char *into, long size) {
    long fd = syscall(SYS_openat, AT_FDCWD, control, O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0) return 0;
    long count = syscall(SYS_read, fd, into, size - 1);
    syscall(SYS_close, fd);
    return count < 0 ? 0 : count;
}

/* What the control file says of a group: 0 nothing, above 0 an errno or a length, -1 hang. */
static int told(const char *group) {
    char text[4096], *rest = text, *line;
    text[load(text, sizeof text)] = 0;
    while ((line = strsep(&rest, "\n"))) {
        char *word = strsep(&line, " ");
        if (!line || (strcmp(word, group) && (strcmp(word, "all") || !strcmp(group, "names"))))
            continue;
        return strcmp(line, "hang") ? atoi(line) : -1;
    }
    return 0;
}

static void announce(const char *group) {
    char path[4096];
    snprintf(path, sizeof path, "%s.%s", control, group);
    long fd = syscall(SYS_openat, AT_FDCWD, path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    if (fd >= 0) syscall(SYS_close, fd);
}

static int is_below(const char *path) {
    size_t length = below ? strlen(below) : 0;
    return length && control && !strncmp(path, below, length) && (path[length] == '/' || !path[length]);
}

static int is_open_below(int fd) {
    char link[64], path[4096];
    if (!below || !control || fd < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long count = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (count < 0) return 0;
    path[count] = 0;
    return is_below(path);
}

static int is_ours(int directory, const char *path) {
    if (path && path[0] == '/') return is_below(path);
    return directory != AT_FDCWD && is_open_below(directory);
}

/* Whether the call fails, with errno set; waits as long as it is to hang. */
static int fails(const char *group) {
    struct timespec pause = {0, 5000000};
    int kept = errno, what;
    while ((what = told(group)) < 0) {
        announce(group);
        nanosleep(&pause, NULL);
    }
    errno = what ? what : kept;
    return what != 0;
}

/* The path as a file system with short names takes it. */
static const char *cut(const char *path, char *into, size_t size) {
    int kept = errno, length = path && is_below(path) ? told("names") : 0;
    errno = kept;
    if (length <= 0 || strlen(path) >= size) return path;
    size_t from = strlen(below), to = from;
    memcpy(into, path, from);
    for (int taken = 0; path[from]; from++) {
        taken = path[from] == '/' ? 0 : taken + 1;
        if (taken <= length) into[to++] = path[from];
    }
    into[to] = 0;
    return into;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define ON_FD(result, name, group, declared, passed) \
    result name declared { \
        REAL(name); \
        if (is_open_below(fd) && fails(group)) return -1; \
        return real passed; \
    }

#define ON_PATH(result, name, group, declared, at, passed) \
    result name declared { \
        char room[4096]; \
        REAL(name); \
        if (is_ours(at, path) && fails(group)) return -1; \
        path = cut(path, room, sizeof room); \
        return real passed; \
    }

#define OPENS(name, declared, at, passed) \
    int name declared { \
        char room[4096]; \
        mode_t mode = 0; \
        REAL(name); \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list rest; \
            va_start(rest, flags); \
            mode = va_arg(rest, mode_t); \
            va_end(rest); \
        } \
        if (is_ours(at, path) && fails(flags & O_CREAT ? "create" : "open")) return -1; \
        path = cut(path, room, sizeof room); \
        return real passed; \
    }

OPENS(open, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPENS(open64, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPENS(openat, (int fd, const char *path, int flags, ...), fd, (fd, path, flags, mode))
OPENS(openat64, (int fd, const char *path, int flags, ...), fd, (fd, path, flags, mode))

ON_FD(ssize_t, read, "read", (int fd, void *to, size_t n), (fd, to, n))
ON_FD(ssize_t, pread, "read", (int fd, void *to, size_t n, off_t at), (fd, to, n, at))
ON_FD(ssize_t, pread64, "read", (int fd, void *to, size_t n, off64_t at), (fd, to, n, at))
ON_FD(ssize_t, readv, "read", (int fd, const struct iovec *v, int n), (fd, v, n))
ON_FD(ssize_t, preadv, "read", (int fd, const struct iovec *v, int n, off_t at), (fd, v, n, at))
ON_FD(ssize_t, preadv64, "read", (int fd, const struct iovec *v, int n, off64_t at), (fd, v, n, at))
ON_FD(ssize_t, preadv2, "read", (int fd, const struct iovec *v, int n, off_t at, int f), (fd, v, n, at, f))
ON_FD(ssize_t, preadv64v2, "read", (int fd, const struct iovec *v, int n, off64_t at, int f), (fd, v, n, at, f))
ON_FD(ssize_t, write, "write", (int fd, const void *from, size_t n), (fd, from, n))
ON_FD(ssize_t, pwrite, "write", (int fd, const void *from, size_t n, off_t at), (fd, from, n, at))
ON_FD(ssize_t, pwrite64, "write", (int fd, const void *from, size_t n, off64_t at), (fd, from, n, at))
ON_FD(ssize_t, writev, "write", (int fd, const struct iovec *v, int n), (fd, v, n))
ON_FD(ssize_t, pwritev, "write", (int fd, const struct iovec *v, int n, off_t at), (fd, v, n, at))
ON_FD(ssize_t, pwritev64, "write", (int fd, const struct iovec *v, int n, off64_t at), (fd, v, n, at))
ON_FD(ssize_t, pwritev2, "write", (int fd, const struct iovec *v, int n, off_t at, int f), (fd, v, n, at, f))
ON_FD(ssize_t, pwritev64v2, "write", (int fd, const struct iovec *v, int n, off64_t at, int f), (fd, v, n, at, f))
ON_FD(int, fallocate, "write", (int fd, int mode, off_t at, off_t n), (fd, mode, at, n))
ON_FD(int, fallocate64, "write", (int fd, int mode, off64_t at, off64_t n), (fd, mode, at, n))
ON_FD(int, ftruncate, "write", (int fd, off_t n), (fd, n))
ON_FD(int, ftruncate64, "write", (int fd, off64_t n), (fd, n))
ON_FD(int, fsync, "sync", (int fd), (fd))
ON_FD(int, fdatasync, "sync", (int fd), (fd))
ON_FD(int, flock, "lock", (int fd, int operation), (fd, operation))
ON_FD(int, fstat, "fstat", (int fd, struct stat *to), (fd, to))
ON_FD(int, fstat64, "fstat", (int fd, struct stat64 *to), (fd, to))
ON_FD(int, fstatvfs, "statvfs", (int fd, struct statvfs *to), (fd, to))
ON_FD(int, fstatvfs64, "statvfs", (int fd, struct statvfs64 *to), (fd, to))
ON_FD(int, fchmod, "touch", (int fd, mode_t mode), (fd, mode))
ON_FD(int, futimens, "touch", (int fd, const struct timespec times[2]), (fd, times))

/* These return the error instead of setting errno. */
int posix_fallocate(int fd, off_t at, off_t n) {
    REAL(posix_fallocate);
    return is_open_below(fd) && fails("write") ? errno : real(fd, at, n);
}
int posix_fallocate64(int fd, off64_t at, off64_t n) {
    REAL(posix_fallocate64);
    return is_open_below(fd) && fails("write") ? errno : real(fd, at, n);
}

ON_PATH(int, stat, "stat", (const char *path, struct stat *to), AT_FDCWD, (path, to))
ON_PATH(int, stat64, "stat", (const char *path, struct stat64 *to), AT_FDCWD, (path, to))
ON_PATH(int, lstat, "stat", (const char *path, struct stat *to), AT_FDCWD, (path, to))
ON_PATH(int, lstat64, "stat", (const char *path, struct stat64 *to), AT_FDCWD, (path, to))
ON_PATH(int, fstatat, "stat", (int fd, const char *path, struct stat *to, int flags), fd, (fd, path, to, flags))
ON_PATH(int, fstatat64, "stat", (int fd, const char *path, struct stat64 *to, int flags), fd, (fd, path, to, flags))
ON_PATH(int, access, "stat", (const char *path, int mode), AT_FDCWD, (path, mode))
ON_PATH(int, faccessat, "stat", (int fd, const char *path, int mode, int flags), fd, (fd, path, mode, flags))
ON_PATH(int, statvfs, "statvfs", (const char *path, struct statvfs *to), AT_FDCWD, (path, to))
ON_PATH(int, statvfs64, "statvfs", (const char *path, struct statvfs64 *to), AT_FDCWD, (path, to))
ON_PATH(int, unlink, "unlink", (const char *path), AT_FDCWD, (path))
ON_PATH(int, unlinkat, "unlink", (int fd, const char *path, int flags), fd, (fd, path, flags))
ON_PATH(int, rmdir, "unlink", (const char *path), AT_FDCWD, (path))
ON_PATH(int, mkdir, "mkdir", (const char *path, mode_t mode), AT_FDCWD, (path, mode))
ON_PATH(int, mkdirat, "mkdir", (int fd, const char *path, mode_t mode), fd, (fd, path, mode))
ON_PATH(int, chmod, "touch", (const char *path, mode_t mode), AT_FDCWD, (path, mode))
ON_PATH(int, fchmodat, "touch", (int fd, const char *path, mode_t mode, int flags), fd, (fd, path, mode, flags))
ON_PATH(int, utimensat, "touch", (int fd, const char *path, const struct timespec times[2], int flags), fd, (fd, path, times, flags))

int rename(const char *from, const char *to) {
    char room[4096], other[4096];
    REAL(rename);
    if (is_below(to) && fails("rename")) return -1;
    return real(cut(from, room, sizeof room), cut(to, other, sizeof other));
}
int renameat(int fd, const char *from, int into, const char *to) {
    char room[4096], other[4096];
    REAL(renameat);
    if (is_ours(into, to) && fails("rename")) return -1;
    return real(fd, cut(from, room, sizeof room), into, cut(to, other, sizeof other));
}

DIR *opendir(const char *path) {
    char room[4096];
    REAL(opendir);
    if (is_below(path) && fails("list")) return NULL;
    return real(cut(path, room, sizeof room));
}
DIR *fdopendir(int fd) {
    REAL(fdopendir);
    if (is_open_below(fd) && fails("list")) return NULL;
    return real(fd);
}
