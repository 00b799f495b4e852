/* The program `liger`: LuaJIT with the project's Lua, cjson and lpeg built in. It finds lua/
 * relative to itself, runs `require("liger.cli").main(arg)`, and turns errors into one line and an
 * exit status: 1 an error, 2 a wrong use. It also provides the module `liger.sys`: line editing,
 * calls that Ctrl-C stops, and other programs in this one's place. */
#include <errno.h>
#include <fcntl.h>
#include <histedit.h>
#include <limits.h>
#include <locale.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>

/* ---- where things are ---- */

typedef struct place {
    char data[PATH_MAX];    /* the folder that holds lua/ and recipes/ */
    char gen[PATH_MAX];     /* the folder that holds abi.lua */
    char library[PATH_MAX]; /* libliger.so */
} place;

static bool exists(const char *folder, const char *name) {
    char path[PATH_MAX];
    int n = snprintf(path, sizeof(path), "%s/%s", folder, name);
    return n > 0 && n < (int)sizeof(path) && access(path, F_OK) == 0;
}

/* Cuts the last name off a path; false at the root. */
static bool parent(char *path) {
    char *slash = strrchr(path, '/');
    if (!slash) return false;
    *slash = '\0';
    return true;
}

static bool join(char *path, const char *folder, const char *name) {
    int n = snprintf(path, PATH_MAX, "%s/%s", folder, name);
    return n > 0 && n < PATH_MAX;
}

/* Installed: PREFIX/bin/liger, PREFIX/lib/libliger.so, PREFIX/share/liger. Built: all beside the
 * program, lua/ in a folder above it. */
static bool find_place(place *p) {
    char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    if (n <= 0) return false;
    self[n] = '\0';
    if (!parent(self)) return false;
    if (exists(self, "../share/liger/lua/liger")) {
        return parent(self) && join(p->data, self, "share/liger") &&
               join(p->gen, self, "share/liger") && join(p->library, self, "lib/libliger.so");
    }
    if (!join(p->gen, self, "gen") || !join(p->library, self, "libliger.so")) return false;
    while (!exists(self, "lua/liger")) {
        if (!parent(self)) return false;
    }
    strcpy(p->data, self);
    return true;
}

static void set_path(lua_State *L, const place *p) {
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "path");
    lua_pushfstring(L, "%s/lua/?.lua;%s/lua/?/init.lua;%s/?.lua;%s", p->data, p->data, p->gen,
                    lua_tostring(L, -1));
    lua_setfield(L, -3, "path");
    lua_pop(L, 2);
}

/* ---- line editing ---- */

/* One terminal, one editor: libedit's callbacks reach this through the client data. */
typedef struct editor {
    EditLine *el;
    History *history;
    lua_State *L;
    char prompt[64];
    int complete; /* registry reference of the completion function, or LUA_NOREF */
    bool cancelled;
} editor;

static editor the_editor = {.complete = LUA_NOREF};

static editor *editor_of(EditLine *el) {
    void *data = NULL;
    el_get(el, EL_CLIENTDATA, &data);
    return data;
}

static char *prompt_of(EditLine *el) { return editor_of(el)->prompt; }

static unsigned char cancel_line(EditLine *el, int ch) {
    (void)ch;
    editor_of(el)->cancelled = true;
    return CC_EOF;
}

/* libedit's own handler puts the terminal right on the way out and back. */
static unsigned char suspend(EditLine *el, int ch) {
    (void)el, (void)ch;
    kill(0, SIGTSTP);
    return CC_NORM;
}

static bool is_word(char c) {
    return c == '_' || c == '.' || c == ':' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') ||
           (c >= 'A' && c <= 'Z');
}

/* Inserts what all candidates share beyond `typed` bytes; lists them when that is nothing. Expects
 * the list on top. */
static unsigned char show_candidates(lua_State *L, EditLine *el, size_t typed) {
    int n = lua_istable(L, -1) ? (int)lua_objlen(L, -1) : 0;
    if (n == 0) return CC_REFRESH_BEEP;
    lua_rawgeti(L, -1, 1);
    char *shared = strdup(lua_tostring(L, -1) ? lua_tostring(L, -1) : "");
    lua_pop(L, 1);
    if (!shared) return CC_ERROR;
    for (int i = 2; i <= n; i++) {
        lua_rawgeti(L, -1, i);
        const char *word = lua_tostring(L, -1);
        size_t k = 0;
        while (word && shared[k] && shared[k] == word[k]) k++;
        shared[k] = '\0';
        lua_pop(L, 1);
    }
    unsigned char result = CC_REDISPLAY;
    if (strlen(shared) > typed) {
        el_insertstr(el, shared + typed);
        result = CC_REFRESH;
    } else {
        fputc('\n', stdout);
        for (int i = 1; i <= n; i++) {
            lua_rawgeti(L, -1, i);
            if (lua_tostring(L, -1)) fprintf(stdout, "%s  ", lua_tostring(L, -1));
            lua_pop(L, 1);
        }
        fputc('\n', stdout);
        fflush(stdout);
    }
    free(shared);
    return result;
}

static unsigned char complete_word(EditLine *el, int ch) {
    (void)ch;
    editor *e = editor_of(el);
    const LineInfo *line = el_line(el);
    const char *start = line->cursor;
    while (start > line->buffer && is_word(start[-1])) start--;
    size_t typed = (size_t)(line->cursor - start);
    if (e->complete == LUA_NOREF || typed == 0) {
        el_insertstr(el, "  ");
        return CC_REFRESH;
    }
    lua_State *L = e->L;
    lua_rawgeti(L, LUA_REGISTRYINDEX, e->complete);
    lua_pushlstring(L, start, typed);
    unsigned char result = CC_REFRESH_BEEP;
    if (lua_pcall(L, 1, 1, 0) == 0) result = show_candidates(L, el, typed);
    lua_pop(L, 1);
    return result;
}

static bool open_editor(editor *e, lua_State *L) {
    e->L = L;
    if (e->el) return true;
    HistEvent event;
    e->history = history_init();
    e->el = el_init("liger", stdin, stdout, stderr);
    if (!e->el || !e->history) return false;
    history(e->history, &event, H_SETSIZE, 2000);
    history(e->history, &event, H_SETUNIQUE, 1);
    el_set(e->el, EL_CLIENTDATA, e);
    el_set(e->el, EL_PROMPT, prompt_of);
    el_set(e->el, EL_EDITOR, "emacs");
    el_set(e->el, EL_SIGNAL, 1);
    el_set(e->el, EL_HIST, history, e->history);
    el_set(e->el, EL_ADDFN, "liger-complete", "complete a name", complete_word);
    el_set(e->el, EL_ADDFN, "liger-cancel", "give the line up", cancel_line);
    el_set(e->el, EL_ADDFN, "liger-suspend", "suspend the program", suspend);
    el_source(e->el, NULL);
    el_set(e->el, EL_BIND, "^I", "liger-complete", NULL);
    el_set(e->el, EL_BIND, "^R", "em-inc-search-prev", NULL);
    el_set(e->el, EL_BIND, "\\e[1;5C", "em-next-word", NULL);
    el_set(e->el, EL_BIND, "\\e[1;5D", "ed-prev-word", NULL);
    /* Ctrl-C is a key while a line is edited, so that it can clear the line; Ctrl-Z with it. */
    el_set(e->el, EL_SETTY, "-d", "-isig", NULL);
    el_set(e->el, EL_BIND, "^C", "liger-cancel", NULL);
    el_set(e->el, EL_BIND, "^Z", "liger-suspend", NULL);
    return true;
}

static void close_editor(editor *e) {
    if (e->el) el_end(e->el);
    if (e->history) history_end(e->history);
    *e = (editor){.complete = LUA_NOREF};
}

/* readline(prompt) -> line without its newline; nil, "eof" at the end of input; nil, "cancelled"
 * after Ctrl-C */
static int sys_readline(lua_State *L) {
    editor *e = &the_editor;
    const char *prompt = luaL_checkstring(L, 1);
    if (!open_editor(e, L)) return luaL_error(L, "readline: the terminal cannot be edited");
    snprintf(e->prompt, sizeof(e->prompt), "%s", prompt);
    e->cancelled = false;
    int n = 0;
    const char *line = el_gets(e->el, &n);
    if (!line || n <= 0) {
        fputc('\n', stdout);
        fflush(stdout);
        lua_pushnil(L);
        lua_pushstring(L, e->cancelled ? "cancelled" : "eof");
        return 2;
    }
    if (line[n - 1] == '\n') n--;
    lua_pushlstring(L, line, (size_t)n);
    return 1;
}

/* set_completion(function(word) -> list of whole words) */
static int sys_set_completion(lua_State *L) {
    luaL_checktype(L, 1, LUA_TFUNCTION);
    luaL_unref(L, LUA_REGISTRYINDEX, the_editor.complete);
    lua_settop(L, 1);
    the_editor.complete = luaL_ref(L, LUA_REGISTRYINDEX);
    return 0;
}

static int sys_history_add(lua_State *L) {
    HistEvent event;
    const char *line = luaL_checkstring(L, 1);
    if (open_editor(&the_editor, L)) history(the_editor.history, &event, H_ENTER, line);
    return 0;
}

/* history_load(path), history_save(path) -> whether it worked */
static int history_file(lua_State *L, int action) {
    HistEvent event;
    const char *path = luaL_checkstring(L, 1);
    lua_pushboolean(L, open_editor(&the_editor, L) &&
                           history(the_editor.history, &event, action, path) >= 0);
    return 1;
}

static int sys_history_load(lua_State *L) { return history_file(L, H_LOAD); }

static int sys_history_save(lua_State *L) { return history_file(L, H_SAVE); }

/* ---- calls that Ctrl-C stops ---- */

static lua_State *running;

static void stop_hook(lua_State *L, lua_Debug *debug) {
    (void)debug;
    lua_sethook(L, NULL, 0, 0);
    luaL_error(L, "interrupted");
}

/* Compiled loops look at no hook: a second Ctrl-C ends the process. */
static void on_interrupt(int signal_number) {
    if (!running) _exit(128 + signal_number);
    lua_sethook(running, stop_hook, LUA_MASKCALL | LUA_MASKRET | LUA_MASKCOUNT, 1);
    running = NULL;
}

/* interruptible(f, ...) -> like pcall(f, ...); SIGINT becomes the error "interrupted" in f */
static int sys_interruptible(lua_State *L) {
    luaL_checktype(L, 1, LUA_TFUNCTION);
    struct sigaction action = {.sa_handler = on_interrupt}, before;
    sigemptyset(&action.sa_mask);
    running = L;
    sigaction(SIGINT, &action, &before);
    int status = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0);
    sigaction(SIGINT, &before, NULL);
    running = NULL;
    lua_sethook(L, NULL, 0, 0);
    lua_pushboolean(L, status == 0);
    lua_insert(L, 1);
    return lua_gettop(L);
}

/* ---- a program in this one's place ---- */

static volatile sig_atomic_t launched, num_asked; /* its process, and how often it was to end */

/* The first Ctrl-C is passed on as SIGUSR1, which mpirun hands to its processes; the next as SIGTERM, which ends them. */
static void pass_on(int signal_number) {
    bool is_first = signal_number == SIGINT && num_asked == 0;
    num_asked++;
    if (launched) kill(launched, is_first ? SIGUSR1 : SIGTERM);
}

/* launch(words) -> the exit status of that program, searched for as a shell does, with no input; or nil and why it cannot
 * start. It is a process group of its own, so that a terminal's Ctrl-C comes here alone. */
static int sys_launch(lua_State *L) {
    luaL_checktype(L, 1, LUA_TTABLE);
    char *words[256] = {NULL};
    size_t n = lua_objlen(L, 1);
    if (n == 0 || n >= sizeof words / sizeof *words) return luaL_error(L, "1 to 255 words");
    luaL_checkstack(L, (int)n, "a command's words");
    for (size_t i = 0; i < n; i++) {
        lua_rawgeti(L, 1, (int)i + 1);
        words[i] = (char *)luaL_checkstring(L, -1);
    }
    struct sigaction action = {.sa_handler = pass_on, .sa_flags = SA_RESTART}, before[2];
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, &before[0]);
    sigaction(SIGTERM, &action, &before[1]);
    posix_spawnattr_t attributes;
    posix_spawn_file_actions_t files;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    pid_t pid;
    int status = 0, error = posix_spawnp(&pid, words[0], &files, &attributes, words, environ);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attributes);
    if (!error) {
        launched = pid;
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
        }
        launched = 0;
    }
    sigaction(SIGINT, &before[0], NULL);
    sigaction(SIGTERM, &before[1], NULL);
    if (error) {
        lua_pushnil(L);
        lua_pushstring(L, strerror(error));
        return 2;
    }
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    lua_pushinteger(L, num_asked > 1 ? 128 + SIGINT : code);
    return 1;
}

/* num_cores() -> those that this process may run on */
static int sys_num_cores(lua_State *L) {
    cpu_set_t cores;
    int n = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores)
                                                            : (int)sysconf(_SC_NPROCESSORS_ONLN);
    lua_pushinteger(L, n);
    return 1;
}

/* ---- the module ---- */

static const luaL_Reg sys_functions[] = {
    {"readline", sys_readline},
    {"set_completion", sys_set_completion},
    {"history_add", sys_history_add},
    {"history_load", sys_history_load},
    {"history_save", sys_history_save},
    {"interruptible", sys_interruptible},
    {"launch", sys_launch},
    {"num_cores", sys_num_cores},
    {NULL, NULL},
};

/* Functions, and where things are: `data` (lua/ and recipes/), `gen` (abi.lua), `library`
 * (libliger.so), `version`. */
static int open_sys(lua_State *L) {
    const place *p = lua_touserdata(L, lua_upvalueindex(1));
    lua_newtable(L);
    luaL_register(L, NULL, sys_functions);
    lua_pushstring(L, p->data);
    lua_setfield(L, -2, "data");
    lua_pushstring(L, p->gen);
    lua_setfield(L, -2, "gen");
    lua_pushstring(L, p->library);
    lua_setfield(L, -2, "library");
    lua_pushstring(L, LIGER_VERSION);
    lua_setfield(L, -2, "version");
    return 1;
}

#ifdef LIGER_HAVE_CJSON
int luaopen_cjson(lua_State *L);
int luaopen_cjson_safe(lua_State *L);
#endif
#ifdef LIGER_HAVE_LPEG
int luaopen_lpeg(lua_State *L);
#endif

static void preload(lua_State *L, place *p) {
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "preload");
#ifdef LIGER_HAVE_CJSON
    lua_pushcfunction(L, luaopen_cjson);
    lua_setfield(L, -2, "cjson");
    lua_pushcfunction(L, luaopen_cjson_safe);
    lua_setfield(L, -2, "cjson.safe");
#endif
#ifdef LIGER_HAVE_LPEG
    lua_pushcfunction(L, luaopen_lpeg);
    lua_setfield(L, -2, "lpeg");
#endif
    lua_pushlightuserdata(L, p);
    lua_pushcclosure(L, open_sys, 1);
    lua_setfield(L, -2, "liger.sys");
    lua_pop(L, 2);
}

/* ---- running ---- */

/* An error becomes { message, code, traceback }; tables that carry `message` and `code` keep them.
 */
static int describe_error(lua_State *L) {
    lua_settop(L, 1);
    lua_newtable(L);
    if (lua_istable(L, 1)) {
        lua_getfield(L, 1, "message");
        lua_setfield(L, 2, "message");
        lua_getfield(L, 1, "code");
        lua_setfield(L, 2, "code");
    }
    lua_getfield(L, 2, "message");
    if (lua_isnil(L, -1)) {
        lua_getglobal(L, "tostring");
        lua_pushvalue(L, 1);
        lua_call(L, 1, 1);
        lua_setfield(L, 2, "message");
    }
    lua_settop(L, 2);
    luaL_traceback(L, L, NULL, 1);
    lua_setfield(L, 2, "traceback");
    return 1;
}

/* Prints the description on top of the stack, returns the exit status. */
static int report_error(lua_State *L, bool traceback) {
    if (!lua_istable(L, -1)) {
        const char *text = lua_tostring(L, -1);
        fprintf(stderr, "liger: %s\n", text ? text : "error in the error handler");
        return 1;
    }
    lua_getfield(L, -1, "message");
    lua_getfield(L, -2, "traceback");
    lua_getfield(L, -3, "code");
    const char *message = lua_tostring(L, -3);
    int code = lua_isnumber(L, -1) ? (int)lua_tointeger(L, -1) : 1;
    if (!message) message = "unknown error";
    int line_bytes = traceback ? (int)strlen(message) : (int)strcspn(message, "\n");
    fprintf(stderr, "liger: %.*s\n", line_bytes, message);
    if (traceback) fprintf(stderr, "%s\n", lua_tostring(L, -2));
    lua_pop(L, 3);
    return code;
}

/* Sets the global `arg` and leaves it on the stack; takes --traceback out of it. */
static bool push_arguments(lua_State *L, int argc, char **argv) {
    const char *setting = getenv("LIGER_TRACEBACK");
    bool traceback = setting && setting[0] && strcmp(setting, "0") != 0;
    int n = 0;
    lua_createtable(L, argc, 1);
    for (int i = 0; i < argc; i++) {
        if (i > 0 && strcmp(argv[i], "--traceback") == 0) {
            traceback = true;
            setenv("LIGER_TRACEBACK", "1", 1); /* for processes started from here */
            continue;
        }
        lua_pushstring(L, argv[i]);
        lua_rawseti(L, -2, n++);
    }
    lua_pushvalue(L, -1);
    lua_setglobal(L, "arg");
    return traceback;
}

static int run_cli(lua_State *L) {
    lua_getglobal(L, "require");
    lua_pushliteral(L, "liger.cli");
    lua_call(L, 1, 1);
    lua_getfield(L, -1, "main");
    lua_pushvalue(L, 1);
    lua_call(L, 1, 1);
    return 1;
}

int main(int argc, char **argv) {
    static place where;
    setlocale(LC_CTYPE, "");
    if (!find_place(&where)) {
        fprintf(stderr, "liger: lua/liger: not found above the program, reinstall or rebuild\n");
        return 1;
    }
    lua_State *L = luaL_newstate();
    if (!L) {
        fprintf(stderr, "liger: no memory for Lua\n");
        return 1;
    }
    luaL_openlibs(L);
    set_path(L, &where);
    preload(L, &where);
    lua_pushcfunction(L, describe_error);
    lua_pushcfunction(L, run_cli);
    bool traceback = push_arguments(L, argc, argv);
    int status = 0;
    if (lua_pcall(L, 1, 1, 1) != 0) {
        status = report_error(L, traceback);
    } else if (lua_isnumber(L, -1)) {
        status = (int)lua_tointeger(L, -1);
    }
    close_editor(&the_editor);
    lua_close(L);
    return status;
}
