#include "tests/fake_cuda/faults.h"

#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#include "tests/fake_cuda/control.h"

namespace fake_cuda {
namespace {

struct Point {
  CUresult error = CUDA_SUCCESS;
  int skip = 0;
  int count = 0;  // failures left; negative: for ever
  int delay_us = 0;
  long passed = 0;
};

struct Faults {
  std::mutex mutex;
  std::map<std::string, Point> points;
  std::set<std::string> hidden;

  Faults() { ReadEnvironment(); }

  // FAKE_CUDA_FAIL="call=error[:skip[:count]],..." and FAKE_CUDA_DELAY_US="call=microseconds,...". Points have ':' in their names, so the
  // numbers are what follows '='.
  void ReadEnvironment() {
    ForEach("FAKE_CUDA_FAIL", [](Point* point, std::istringstream numbers) {
      int error = 0;
      char colon = 0;
      numbers >> error;
      point->error = static_cast<CUresult>(error);
      point->count = -1;
      if (numbers >> colon) numbers >> point->skip;
      if (numbers >> colon) numbers >> point->count;
    });
    ForEach("FAKE_CUDA_DELAY_US", [](Point* point, std::istringstream numbers) { numbers >> point->delay_us; });
  }

  template <typename Set>
  void ForEach(const char* variable, Set set) {
    const char* text = std::getenv(variable);
    std::istringstream items(text != nullptr ? text : "");
    for (std::string item; std::getline(items, item, ',');) {
      const size_t equals = item.find('=');
      if (equals != std::string::npos) set(&points[item.substr(0, equals)], std::istringstream(item.substr(equals + 1)));
    }
  }
};

// Never destroyed: the devices' threads use it until the process ends.
Faults& Global() {
  static Faults& faults = *new Faults;
  return faults;
}

}  // namespace

CUresult Pass(const char* name) {
  Faults& faults = Global();
  CUresult result = CUDA_SUCCESS;
  int delay_us = 0;
  {
    std::lock_guard<std::mutex> lock(faults.mutex);
    Point& point = faults.points[name];
    ++point.passed;
    delay_us = point.delay_us;
    if (point.error != CUDA_SUCCESS && point.count != 0) {
      if (point.skip > 0) {
        --point.skip;
      } else {
        if (point.count > 0) --point.count;
        result = point.error;
      }
    }
  }
  if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
  return result;
}

bool IsHidden(const char* call) {
  std::lock_guard<std::mutex> lock(Global().mutex);
  return Global().hidden.count(call) != 0;
}

void ResetFaults() {
  std::lock_guard<std::mutex> lock(Global().mutex);
  Global().points.clear();
  Global().hidden.clear();
}

}  // namespace fake_cuda

void fakeCudaFail(const char* name, CUresult error, int skip, int count) {
  std::lock_guard<std::mutex> lock(fake_cuda::Global().mutex);
  fake_cuda::Point& point = fake_cuda::Global().points[name];
  point.error = error;
  point.skip = skip;
  point.count = count;
}

void fakeCudaDelay(const char* name, int microseconds) {
  std::lock_guard<std::mutex> lock(fake_cuda::Global().mutex);
  fake_cuda::Global().points[name].delay_us = microseconds;
}

long fakeCudaCalls(const char* name) {
  std::lock_guard<std::mutex> lock(fake_cuda::Global().mutex);
  return fake_cuda::Global().points[name].passed;
}

void fakeCudaHide(const char* call) {
  std::lock_guard<std::mutex> lock(fake_cuda::Global().mutex);
  fake_cuda::Global().hidden.insert(call);
}
