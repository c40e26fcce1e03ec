// printf and assert, which NVRTC provides without an include, and so does the emulator.
#pragma once

extern "C" __attribute__((format(printf, 1, 2))) int printf(const char*, ...);

namespace emulator {

inline void check_assertion(bool holds, const char* condition, FLASHGEN_SITE) {
  if (!holds) fail(site, "assert(%s) does not hold", condition);
}

}  // namespace emulator

#define assert(condition) ::emulator::check_assertion(static_cast<bool>(condition), #condition)
