// Tells which compiled variants this CPU can run. Asked of the portable library, which runs everywhere.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(__x86_64__) && defined(__linux__)

// AMX's registers are large, so Linux saves them only for processes that have asked for it: this one does, for all its
// threads. False where the CPU has none, or the system gives none, as to a process with a thread whose own stack for signals is
// too small for them. (It takes no such stack afterwards.)
bool may_use_tiles() {
    constexpr unsigned kTiles = 1u << 24, kBf16 = 1u << 22, kInt8 = 1u << 25, kAll = kTiles | kBf16 | kInt8;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAll) != kAll) return false;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#else

bool may_use_tiles() { return false; }

#endif

}  // namespace

extern "C" int pellucid_cpu_supports(const char* variant) {
    if (std::strcmp(variant, "portable") == 0) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    const bool bf16 = v4 && __builtin_cpu_supports("avx512bf16");
    if (std::strcmp(variant, "avx2") == 0) return v3;
    if (std::strcmp(variant, "avx512") == 0) return v4;
    if (std::strcmp(variant, "avx512-bf16") == 0) return bf16;
    if (std::strcmp(variant, "amx") == 0) return bf16 && may_use_tiles();
#endif
    return 0;
}
