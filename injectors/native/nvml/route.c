/* Every exported function is a stub of two instructions. It does not touch the arguments, asks `route` which function to
 * call, and jumps to it: the driver's, the overlay's, or one that returns an error that was ordered. So a call of any
 * function can be passed on, also if the types of its arguments are not known here. */
#define _GNU_SOURCE
#include "overlay.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#if defined(__x86_64__)
#define STUB(number, name) \
    __asm__(".text\n.globl " #name "\n.type " #name ", @function\n" #name ":\n" \
            "endbr64\nmovl $" #number ", %r11d\njmp torchaos_nvml_enter\n.size " #name ", .-" #name "\n");
/* Saved: the six integer arguments, rax (the number of vector ones in a variadic call), and the vector registers. */
__asm__(".text\n.type torchaos_nvml_enter, @function\ntorchaos_nvml_enter:\n"
        "pushq %rbp\nmovq %rsp, %rbp\n"
        "pushq %rdi\npushq %rsi\npushq %rdx\npushq %rcx\npushq %r8\npushq %r9\npushq %rax\nsubq $136, %rsp\n"
        "movups %xmm0, (%rsp)\nmovups %xmm1, 16(%rsp)\nmovups %xmm2, 32(%rsp)\nmovups %xmm3, 48(%rsp)\n"
        "movups %xmm4, 64(%rsp)\nmovups %xmm5, 80(%rsp)\nmovups %xmm6, 96(%rsp)\nmovups %xmm7, 112(%rsp)\n"
        "movq %rdi, %rsi\nmovl %r11d, %edi\ncall torchaos_nvml_route\nmovq %rax, %r11\n"
        "movups (%rsp), %xmm0\nmovups 16(%rsp), %xmm1\nmovups 32(%rsp), %xmm2\nmovups 48(%rsp), %xmm3\n"
        "movups 64(%rsp), %xmm4\nmovups 80(%rsp), %xmm5\nmovups 96(%rsp), %xmm6\nmovups 112(%rsp), %xmm7\n"
        "addq $136, %rsp\npopq %rax\npopq %r9\npopq %r8\npopq %rcx\npopq %rdx\npopq %rsi\npopq %rdi\npopq %rbp\n"
        "jmp *%r11\n.size torchaos_nvml_enter, .-torchaos_nvml_enter\n");
#elif defined(__aarch64__)
#define STUB(number, name) \
    __asm__(".text\n.globl " #name "\n.type " #name ", %function\n" #name ":\n" \
            "hint #34\nmov w16, #" #number "\nb torchaos_nvml_enter\n.size " #name ", .-" #name "\n");
__asm__(".text\n.type torchaos_nvml_enter, %function\ntorchaos_nvml_enter:\n"
        "stp x29, x30, [sp, #-224]!\nmov x29, sp\n"
        "stp x0, x1, [sp, #16]\nstp x2, x3, [sp, #32]\nstp x4, x5, [sp, #48]\nstp x6, x7, [sp, #64]\nstr x8, [sp, #80]\n"
        "stp q0, q1, [sp, #96]\nstp q2, q3, [sp, #128]\nstp q4, q5, [sp, #160]\nstp q6, q7, [sp, #192]\n"
        "mov x1, x0\nmov w0, w16\nbl torchaos_nvml_route\nmov x16, x0\n"
        "ldp x0, x1, [sp, #16]\nldp x2, x3, [sp, #32]\nldp x4, x5, [sp, #48]\nldp x6, x7, [sp, #64]\nldr x8, [sp, #80]\n"
        "ldp q0, q1, [sp, #96]\nldp q2, q3, [sp, #128]\nldp q4, q5, [sp, #160]\nldp q6, q7, [sp, #192]\n"
        "ldp x29, x30, [sp], #224\nbr x16\n.size torchaos_nvml_enter, .-torchaos_nvml_enter\n");
#else
#error "stubs are there for x86-64 and aarch64"
#endif

#define S(number, name, takes, served) STUB(number, name)
#include "symbols.inc"
#undef S

typedef enum { takes_other, takes_device } Takes;
typedef enum { served_forward, served_simulate, served_overlay } Served;
typedef struct { const char *name; Takes takes; Served served; void *own; } Symbol;

#define OWN_forward(name)
#define OWN_simulate(name) extern char serve_##name[];
#define OWN_overlay(name) extern char serve_##name[];
#define S(number, name, takes, served) OWN_##served(name)
#include "symbols.inc"
#undef S

#define AT_forward(name) NULL
#define AT_simulate(name) serve_##name
#define AT_overlay(name) serve_##name
#define S(number, name, takes, served) {#name, takes_##takes, served_##served, AT_##served(name)},
static const Symbol SYMBOLS[] = {
#include "symbols.inc"
};
#undef S

enum { COUNT = sizeof SYMBOLS / sizeof *SYMBOLS };

static void *driver, *functions[COUNT];
static pthread_once_t loaded = PTHREAD_ONCE_INIT;

static bool is_this_library(const char *path)
{
    Dl_info ours;
    struct stat a, b;
    return dladdr((void *)is_this_library, &ours) && stat(ours.dli_fname, &a) == 0 && stat(path, &b) == 0
           && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

static void load_driver(void)
{
    /* By path: by name it would be this library again. Where distributions, containers and WSL keep it. */
    static const char *const PLACES[] = {
#if defined(__x86_64__)
        "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.1",
#else
        "/usr/lib/aarch64-linux-gnu/libnvidia-ml.so.1", "/usr/lib/aarch64-linux-gnu/nvidia/current/libnvidia-ml.so.1",
#endif
        "/usr/lib64/libnvidia-ml.so.1", "/usr/lib/libnvidia-ml.so.1", "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
        "/usr/local/nvidia/lib/libnvidia-ml.so.1", "/run/opengl-driver/lib/libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1", NULL,
    };
    const char *named = getenv("TORCHAOS_NVML_REAL"); /* a path, or "none" */
    const char *const only[] = {named, NULL};
    for (const char *const *place = named && *named ? only : PLACES; *place && !driver; place++)
        if (!is_this_library(*place))
            driver = dlopen(*place, RTLD_NOW | RTLD_LOCAL);
    for (unsigned i = 0; driver && i < COUNT; i++)
        functions[i] = dlsym(driver, SYMBOLS[i].name);
}

bool have_driver(void)
{
    pthread_once(&loaded, load_driver);
    return driver != NULL;
}

void *real(unsigned symbol) { return have_driver() ? functions[symbol] : NULL; }

int gpu_of(Device device)
{
    unsigned index;
    if (!have_driver())
        return simulated_index(device);
    int (*get_index)(Device, unsigned *) = (int (*)(Device, unsigned *))real(SYM_nvmlDeviceGetIndex);
    return device && get_index && get_index(device, &index) == SUCCESS && index < MAX_GPUS ? (int)index : ANY_GPU;
}

static __thread int refused_with;

static int refuse(void) { return refused_with; }

static void *refusing(int code)
{
    refused_with = code;
    return (void *)refuse;
}

/* Where this call goes. Called by the stubs, with the first argument. */
__attribute__((used, visibility("hidden"))) void *torchaos_nvml_route(unsigned number, void *first)
{
    const Symbol *symbol = &SYMBOLS[number];
    bool events = symbol->own && (strncmp(symbol->name, "nvmlEventSet", 12) == 0 || number == SYM_nvmlDeviceRegisterEvents);
    bool given = orders_given();
    if (given && number != SYM_nvmlErrorString) { /* which returns no error code */
        int code = refusal(symbol->takes == takes_device ? gpu_of(first) : ANY_GPU, symbol->name);
        if (code != SUCCESS)
            return refusing(code);
    }
    if (have_driver()) {
        bool ours = symbol->served == served_overlay && (given || (events && getenv("TORCHAOS_NVML_CONTROL")));
        if (!functions[number])
            return refusing(13); /* NVML_ERROR_FUNCTION_NOT_FOUND: what its caller would have found */
        return ours ? symbol->own : functions[number];
    }
    if (!symbol->own)
        return refusing(simulated_ready() ? NOT_SUPPORTED : UNINITIALIZED);
    if (symbol->takes == takes_device) {
        if (!simulated_ready())
            return refusing(UNINITIALIZED);
        if (simulated_index(first) < 0)
            return refusing(INVALID_ARGUMENT);
    }
    return symbol->own;
}
