// Argument checks of the compiled ops. The public Python functions have checked already and speak
// better; these guard memory.
#pragma once
#include <sstream>
#include <stdexcept>

#define PFL_CHECK(cond, ...)                                           \
  do {                                                                 \
    if (!(cond)) throw std::runtime_error(pflcore::text(__VA_ARGS__)); \
  } while (0)

namespace pflcore {

template <class... Args>
std::string text(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

}  // namespace pflcore
