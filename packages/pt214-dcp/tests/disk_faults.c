// Loaded before libc: the n-th call of a kind on a file of a checkpoint fails, or writes less.
//   FAULT_CALL write | fsync     FAULT_AT n (from 1)     FAULT_ERRNO e, or 0 for a short write
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_int calls;

static int ours(int fd) {
  char name[64], path[4096];
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(name, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return strstr(path, "/gen-") != NULL || strstr(path, "/COMMIT.json") != NULL;
}

static int due(const char *kind, int fd) {
  const char *call = getenv("FAULT_CALL"), *at = getenv("FAULT_AT");
  if (!call || !at || strcmp(call, kind) || !ours(fd)) return 0;
  return atomic_fetch_add(&calls, 1) + 1 == atoi(at);
}

static int code(void) { return atoi(getenv("FAULT_ERRNO")); }

#define NEXT(name, ...) ((ssize_t(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
  if (due("write", fd)) {
    if (code()) { errno = code(); return -1; }
    size = size > 1 ? size / 2 : size;
  }
  return NEXT("pwrite64", int, const void *, size_t, off64_t)(fd, data, size, at);
}

ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags) {
  struct iovec first;
  if (due("write", fd)) {
    if (code()) { errno = code(); return -1; }
    first = parts[0];
    if (first.iov_len > 1) first.iov_len /= 2;
    parts = &first;
    count = 1;
  }
  return NEXT("pwritev64v2", int, const struct iovec *, int, off64_t, int)(fd, parts, count, at, flags);
}

int fsync(int fd) {
  if (due("fsync", fd)) { errno = code(); return -1; }
  return (int)NEXT("fsync", int)(fd);
}
