/* What Lua needs from the system and its own library lacks: time, terminals, folders, the interrupt
 * flag. Nothing here takes a context; functions that can fail return 0 or errno, and lg_sys_error
 * gives its text. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "liger.h"

struct lg_sys_folder {
    DIR *dir;
};

static volatile sig_atomic_t interrupted;

const char *lg_sys_error(int32_t error) { return strerror(error); }

double lg_sys_time(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

bool lg_sys_isatty(int32_t fd) { return isatty(fd) == 1; }

int32_t lg_sys_columns(void) {
    struct winsize size;
    for (int fd = STDERR_FILENO; fd >= STDIN_FILENO; fd--) {
        if (ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
    }
    return 80;
}

int32_t lg_sys_stat(const char *path, lg_sys_info *info) {
    struct stat s;
    if (!path || !info) return EINVAL;
    if (stat(path, &s) != 0) return errno;
    info->bytes = (double)s.st_size;
    info->mtime = (double)s.st_mtim.tv_sec + 1e-9 * (double)s.st_mtim.tv_nsec;
    info->is_folder = S_ISDIR(s.st_mode);
    return 0;
}

static int32_t make_folder(const char *path) {
    struct stat s;
    if (mkdir(path, 0777) == 0) return 0;
    int error = errno;
    if (error == EEXIST && stat(path, &s) == 0) return S_ISDIR(s.st_mode) ? 0 : ENOTDIR;
    return error;
}

int32_t lg_sys_make_folders(const char *path) {
    if (!path) return EINVAL;
    char *part = strdup(path);
    if (!part) return ENOMEM;
    int32_t error = 0;
    for (char *c = part + 1; part[0] && *c && !error; c++) {
        if (*c != '/') continue;
        *c = '\0';
        error = make_folder(part);
        *c = '/';
    }
    if (!error) error = make_folder(part);
    free(part);
    return error;
}

lg_sys_folder *lg_sys_folder_open(const char *path) {
    lg_sys_folder *folder = path ? malloc(sizeof(*folder)) : NULL;
    if (!folder) return NULL;
    folder->dir = opendir(path);
    if (folder->dir) return folder;
    free(folder);
    return NULL;
}

const char *lg_sys_folder_next(lg_sys_folder *folder) {
    if (!folder) return NULL;
    struct dirent *entry;
    while ((entry = readdir(folder->dir))) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            return entry->d_name;
    }
    return NULL;
}

void lg_sys_folder_close(lg_sys_folder *folder) {
    if (!folder) return;
    closedir(folder->dir);
    free(folder);
}

int32_t lg_sys_sync(const char *path) {
    if (!path) return EINVAL;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return errno;
    /* Some file systems cannot sync a folder (EINVAL). */
    int error = fsync(fd) == 0 || errno == EINVAL ? 0 : errno;
    close(fd);
    return error;
}

static void on_interrupt(int signal_number) {
    if (interrupted) _exit(128 + signal_number);
    interrupted = 1;
}

void lg_sys_catch_interrupt(bool on) {
    struct sigaction action = {.sa_handler = on ? on_interrupt : SIG_DFL, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    interrupted = 0;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
}

bool lg_sys_interrupted(void) { return interrupted != 0; }
