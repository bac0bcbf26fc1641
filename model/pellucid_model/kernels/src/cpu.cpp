// Tells which compiled variants this CPU can run. Asked of the portable library only, which runs everywhere.
#include <cstring>

extern "C" int pellucid_cpu_supports(const char* variant) {
    if (std::strcmp(variant, "portable") == 0) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    if (std::strcmp(variant, "avx2") == 0) return v3;
    if (std::strcmp(variant, "avx512") == 0) return v4;
    if (std::strcmp(variant, "avx512-bf16") == 0) return v4 && __builtin_cpu_supports("avx512bf16");
#endif
    return 0;
}
