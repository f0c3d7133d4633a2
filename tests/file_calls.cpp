// Preloaded into a process, it sees each call about a file below a folder: whatever opens, lists, looks up, reads,
// maps, writes, syncs, renames, removes or closes one. It can end the process at one of them, let it fail, and record
// those that change something. test_file_calls.py has the rest.

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static std::string root, failed;
static int number, how, record_to = -1, seen;
static bool for_good, paused = true;

#define REAL(name) ((decltype(&name))dlsym(RTLD_NEXT, #name))

static std::string path_of(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, fd == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path);
    return std::string(path, length < 0 ? 0 : length);
}

static std::string path_of(int fd, const char* name) { return name[0] == '/' ? name : path_of(fd) + "/" + name; }

static void note(const std::string& line) {
    std::string text = line + "\n";
    if (record_to >= 0) (void)!REAL(write)(record_to, text.data(), text.size());
}

// Whether this call has to fail. changes: a letter, r for a call that changes nothing, d for one that frees space, w.
static bool fails(const std::string& path, char changes, const char* call) {
    if (paused || path.compare(0, root.size(), root)) return false;
    seen++;
    bool meant = !for_good || changes == 'w' || (changes == 'd' && how == EROFS);
    if (number == 0 || !meant || (for_good ? seen < number : seen != number)) return false;
    if (how == 0) raise(SIGKILL);
    failed = std::string(call) + " " + path;
    errno = how;
    return true;
}

static void done(bool success, const std::string& line, const std::string& path) {
    int error = errno;
    if (success && !paused && path.compare(0, root.size(), root) == 0) note(line);
    errno = error;
}

extern "C" {

void calls_watch(const char* below, int at, int error, int forever, int to) {
    root = below, number = at, how = error, for_good = forever, record_to = to, seen = 0, paused = false;
}
int calls_pause(int pause) { paused = pause; return seen; }
const char* calls_failed() { return failed.c_str(); }
void calls_mark(const char* text) { note(std::string("mark\t") + text); }

#define OPEN_AT(name) \
    int name(int at, const char* file, int flags, ...) { \
        va_list more; \
        va_start(more, flags); \
        int mode = flags & O_CREAT ? va_arg(more, int) : 0; \
        va_end(more); \
        std::string path = path_of(at, file); \
        if (fails(path, flags & O_CREAT ? 'w' : flags & O_ACCMODE ? 'd' : 'r', "open")) return -1; \
        int fd = REAL(name)(at, file, flags, mode); \
        const std::string what = flags & O_TRUNC ? "truncate\t" : "create\t"; \
        if (flags & (O_CREAT | O_TRUNC)) done(fd >= 0, what + path + "\t0", path); \
        return fd; \
    }
OPEN_AT(openat)
OPEN_AT(openat64)
#define OPEN(name, at_name) \
    int name(const char* file, int flags, ...) { \
        va_list more; \
        va_start(more, flags); \
        int mode = flags & O_CREAT ? va_arg(more, int) : 0; \
        va_end(more); \
        return at_name(AT_FDCWD, file, flags, mode); \
    }
OPEN(open, openat)
OPEN(open64, openat64)

// Calls that change nothing. The last two arguments: what a call returns if it fails, and which file it is about.
#define READER(type, name, parameters, arguments, failure, path) \
    type name parameters { return fails(path, 'r', #name) ? failure : REAL(name) arguments; }
READER(ssize_t, read, (int fd, void* to, size_t n), (fd, to, n), -1, path_of(fd))
READER(ssize_t, pread, (int fd, void* to, size_t n, off_t at), (fd, to, n, at), -1, path_of(fd))
READER(ssize_t, pread64, (int fd, void* to, size_t n, off64_t at), (fd, to, n, at), -1, path_of(fd))
READER(void*, mmap, (void* to, size_t n, int p, int f, int fd, off_t at), (to, n, p, f, fd, at), MAP_FAILED,
       path_of(fd))
READER(void*, mmap64, (void* to, size_t n, int p, int f, int fd, off64_t at), (to, n, p, f, fd, at), MAP_FAILED,
       path_of(fd))
READER(DIR*, opendir, (const char* f), (f), nullptr, path_of(AT_FDCWD, f))
READER(DIR*, fdopendir, (int fd), (fd), nullptr, path_of(fd))
READER(dirent*, readdir, (DIR* folder), (folder), nullptr, path_of(dirfd(folder)))
READER(dirent64*, readdir64, (DIR* folder), (folder), nullptr, path_of(dirfd(folder)))
READER(int, stat, (const char* f, struct stat* to), (f, to), -1, path_of(AT_FDCWD, f))
READER(int, stat64, (const char* f, struct stat64* to), (f, to), -1, path_of(AT_FDCWD, f))
READER(int, lstat, (const char* f, struct stat* to), (f, to), -1, path_of(AT_FDCWD, f))
READER(int, lstat64, (const char* f, struct stat64* to), (f, to), -1, path_of(AT_FDCWD, f))
READER(int, fstat, (int fd, struct stat* to), (fd, to), -1, path_of(fd))
READER(int, fstat64, (int fd, struct stat64* to), (fd, to), -1, path_of(fd))
READER(int, fstatat, (int at, const char* f, struct stat* to, int flags), (at, f, to, flags), -1, path_of(at, f))
READER(int, fstatat64, (int at, const char* f, struct stat64* to, int flags), (at, f, to, flags), -1, path_of(at, f))

int close(int fd) {  // one that fails has closed the file all the same
    bool bad = fails(path_of(fd), 'r', "close");
    int error = errno, result = REAL(close)(fd);
    if (!bad) return result;
    errno = error;
    return -1;
}

ssize_t write(int fd, const void* from, size_t count) {
    std::string path = path_of(fd);
    if (how == 0 && number && seen + 1 == number && !paused && path.compare(0, root.size(), root) == 0)
        (void)!REAL(write)(fd, from, count / 2);  // killed in the middle
    if (fails(path, 'w', "write")) return -1;
    struct stat about;
    REAL(fstat)(fd, &about);
    long start = fcntl(fd, F_GETFL) & O_APPEND ? about.st_size : lseek(fd, 0, SEEK_CUR);
    ssize_t written = REAL(write)(fd, from, count);
    if (record_to >= 0 && written > 0) {
        std::string hex;
        char digits[3];
        for (ssize_t i = 0; i < written; i++) snprintf(digits, 3, "%02x", ((unsigned char*)from)[i]), hex += digits;
        done(true, "write\t" + path + "\t" + std::to_string(start) + "\t" + hex, path);
    }
    return written;
}

#define CALL(name, parameters, arguments, changes, path, line) \
    int name parameters { \
        std::string where = path; \
        if (fails(where, changes, #name)) return -1; \
        int result = REAL(name) arguments; \
        done(result == 0, std::string(line), where); \
        return result; \
    }
CALL(fsync, (int fd), (fd), 'w', path_of(fd), "sync\t" + where)
CALL(ftruncate, (int fd, off_t n), (fd, n), 'd', path_of(fd), "truncate\t" + where + "\t" + std::to_string(n))
CALL(ftruncate64, (int fd, off64_t n), (fd, n), 'd', path_of(fd), "truncate\t" + where + "\t" + std::to_string(n))
CALL(mkdirat, (int at, const char* f, mode_t m), (at, f, m), 'w', path_of(at, f), "mkdir\t" + where)
CALL(mkdir, (const char* f, mode_t m), (f, m), 'w', path_of(AT_FDCWD, f), "mkdir\t" + where)
CALL(unlinkat, (int at, const char* f, int flags), (at, f, flags), 'd', path_of(at, f), "unlink\t" + where)
CALL(unlink, (const char* f), (f), 'd', path_of(AT_FDCWD, f), "unlink\t" + where)
CALL(rmdir, (const char* f), (f), 'd', path_of(AT_FDCWD, f), "unlink\t" + where)
CALL(renameat, (int a, const char* f, int b, const char* g), (a, f, b, g), 'd', path_of(a, f),
     "rename\t" + where + "\t" + path_of(b, g))
CALL(rename, (const char* f, const char* g), (f, g), 'd', path_of(AT_FDCWD, f),
     "rename\t" + where + "\t" + path_of(AT_FDCWD, g))
}
