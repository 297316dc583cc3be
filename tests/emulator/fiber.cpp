/* tests/emulator/fiber.cpp - stacks of GPU threads, and switching between them. */
#include "tests/emulator/emulator.hpp"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if !defined __x86_64__ || defined SPK_EMULATOR_UCONTEXT
#define USE_UCONTEXT 1
#include <ucontext.h>
#else
#define USE_UCONTEXT 0
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulator {

namespace {

constexpr size_t   SLAB_STACKS = 64, COLOURS = 61, COLOUR_BYTES = 64;       /* fibers do not all use the same lines of a cache */
constexpr uint64_t CANARY = 0x5eedcafe0ddba115u;
constexpr size_t   CANARY_WORDS = 8;

std::vector<uint8_t *> free_stacks;
thread  host;                                   /* the host's own stack, as one more thread */
size_t  host_stack_bytes;
const void *host_stack;

} // namespace

uint8_t *stack_take() {
    if (free_stacks.empty()) {
        void *slab = mmap(nullptr, SLAB_STACKS * STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (slab == MAP_FAILED) fail("no memory for stacks");
        for (size_t i = 0; i < SLAB_STACKS; i++) free_stacks.push_back((uint8_t *)slab + i * STACK_BYTES);
    }
    uint8_t *stack = free_stacks.back();
    free_stacks.pop_back();
    for (size_t i = 0; i < CANARY_WORDS; i++) ((uint64_t *)(void *)stack)[i] = CANARY;
    return stack;
}

void stack_give(uint8_t *stack) {
    for (size_t i = 0; i < CANARY_WORDS; i++)
        if (((uint64_t *)(void *)stack)[i] != CANARY) fail("a thread used more than %zu bytes of stack", STACK_BYTES);
#ifdef __SANITIZE_ADDRESS__
    ASAN_UNPOISON_MEMORY_REGION(stack, STACK_BYTES);
#endif
    free_stacks.push_back(stack);
}

static void before_switch(thread *from, thread *to, bool is_last) {
#ifdef __SANITIZE_ADDRESS__
    const bool is_host = to == nullptr;
    __sanitizer_start_switch_fiber(is_last ? nullptr : &(from != nullptr ? from : &host)->sanitizer_stack,
                                   is_host ? host_stack : to->stack, is_host ? host_stack_bytes : STACK_BYTES);
#else
    (void)from, (void)to, (void)is_last;
#endif
}
static void after_switch(thread *own) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(own != nullptr ? own->sanitizer_stack : host.sanitizer_stack, nullptr, nullptr);
#else
    (void)own;
#endif
}
void fiber_begun() {
#ifdef __SANITIZE_ADDRESS__
    const void *bottom;
    size_t size_bytes;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &size_bytes);
    if (host_stack == nullptr) {                /* the first fiber of all is entered from the host */
        host_stack = bottom;
        host_stack_bytes = size_bytes;
    }
#else
    (void)host_stack, (void)host_stack_bytes;
#endif
}

#if USE_UCONTEXT

void fiber_prepare(thread &t, void (*entry)()) {
    ucontext_t *u = (ucontext_t *)malloc(sizeof *u);
    if (u == nullptr || getcontext(u) != 0) fail("no memory for a context");
    u->uc_stack.ss_sp = t.stack;
    u->uc_stack.ss_size = STACK_BYTES;
    u->uc_link = nullptr;
    makecontext(u, entry, 0);
    t.stack_pointer = u;
}
static void swap(thread *from, thread *to) {
    if (host.stack_pointer == nullptr) host.stack_pointer = malloc(sizeof(ucontext_t));
    (void)swapcontext((ucontext_t *)(from != nullptr ? from : &host)->stack_pointer, (ucontext_t *)(to != nullptr ? to : &host)->stack_pointer);
}

#else

/* The registers that a callee keeps are on the stack while a fiber waits. */
extern "C" void spk_emulator_swap(void **save, void *load);
__asm__(".text\n"
        ".p2align 4\n"
        ".type spk_emulator_swap, @function\n"
        "spk_emulator_swap:\n"
        "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n"
        "    ret\n"
        ".size spk_emulator_swap, .-spk_emulator_swap\n");

void fiber_prepare(thread &t, void (*entry)()) {
    const size_t colour = (uintptr_t)t.stack / STACK_BYTES % COLOURS;
    void **top = (void **)(void *)(t.stack + STACK_BYTES - (1 + colour) * COLOUR_BYTES);
    *--top = nullptr;                           /* where entry would return to; keeps the stack as a call leaves it */
    *--top = (void *)entry;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    t.stack_pointer = top;
}
static void swap(thread *from, thread *to) {
    spk_emulator_swap(&(from != nullptr ? from : &host)->stack_pointer, (to != nullptr ? to : &host)->stack_pointer);
}

#endif

void fiber_switch(thread *from, thread *to) {
    before_switch(from, to, false);
    swap(from, to);
    after_switch(from);
}
void fiber_end(thread *from, thread *to) {
    before_switch(from, to, true);
    swap(from, to);
    abort();
}

} // namespace emulator
