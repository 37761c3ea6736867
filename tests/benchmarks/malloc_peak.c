/* LD_PRELOAD: live and peak bytes that malloc has given to this process, on all threads. Blocks
   below MIN are Python's objects and scalars, and are left out. So are mapped files. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#define MIN 16384

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);
static atomic_long live, peak;

static long size(void *p) {
    long n = p ? (long)malloc_usable_size(p) : 0;
    return n < MIN ? 0 : n;
}
static void *given(void *p) {
    long n = size(p);
    if (n) {
        long now = atomic_fetch_add(&live, n) + n, old = atomic_load(&peak);
        while (now > old && !atomic_compare_exchange_weak(&peak, &old, now)) {}
    }
    return p;
}

void *malloc(size_t n) { return given(__libc_malloc(n)); }
void *calloc(size_t a, size_t b) { return given(__libc_calloc(a, b)); }
void *memalign(size_t a, size_t n) { return given(__libc_memalign(a, n)); }
void *aligned_alloc(size_t a, size_t n) { return given(__libc_memalign(a, n)); }
int posix_memalign(void **out, size_t a, size_t n) {
    void *p = given(__libc_memalign(a, n));
    if (p) *out = p;
    return p ? 0 : ENOMEM;
}
void *realloc(void *p, size_t n) {
    long old = size(p);
    void *q = __libc_realloc(p, n);
    if (q || n == 0) atomic_fetch_sub(&live, old);
    return given(q);
}
void free(void *p) { atomic_fetch_sub(&live, size(p)); __libc_free(p); }

long malloc_live(void) { return atomic_load(&live); }
long malloc_peak(void) { return atomic_load(&peak); }
void malloc_reset(void) { atomic_store(&peak, atomic_load(&live)); }
