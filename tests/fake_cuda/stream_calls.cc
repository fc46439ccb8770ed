// The fake's calls on streams and events.
#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "tests/fake_cuda/control.h"
#include "tests/fake_cuda/device.h"
#include "tests/fake_cuda/faults.h"
#include "tests/fake_cuda/memory.h"
#include "tests/fake_cuda/queue.h"

namespace fake_cuda {
namespace {

struct Event {
  Context* context = nullptr;
  std::shared_ptr<std::atomic<bool>> reached;  // of the last record; null before the first one
};

struct Handles {
  std::mutex mutex;
  std::map<CUstream, std::shared_ptr<Stream>> streams;
  std::map<CUevent, std::shared_ptr<Event>> events;
};

Handles& Global() {
  static Handles& handles = *new Handles;  // never destroyed: threads use it until the process ends
  return handles;
}

CUresult FindEvent(CUevent handle, std::shared_ptr<Event>* event) {
  Context* context = nullptr;
  if (const CUresult result = CurrentContext(&context); result != CUDA_SUCCESS) return result;
  std::lock_guard<std::mutex> lock(Global().mutex);
  const auto found = Global().events.find(handle);
  if (found == Global().events.end()) return CUDA_ERROR_INVALID_HANDLE;
  *event = found->second;
  return CUDA_SUCCESS;
}

// The word at a flag's address, while it is certain to be mapped.
template <typename Use>
CUresult WithFlag(CUdeviceptr address, Use use) {
  std::shared_lock<std::shared_mutex> lock(Memory().mutex);
  if (Memory().Find(address, sizeof(uint32_t)) == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
  return use(std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(address)));
}

void EnqueueWrite(Stream* stream, CUdeviceptr address, uint32_t value) {
  stream->Enqueue(Engine::kSameAsBefore, nullptr, [=] {
    if (const CUresult result = Pass("execute:write"); result != CUDA_SUCCESS) return result;
    return WithFlag(address, [=](std::atomic_ref<uint32_t> flag) {
      flag.store(value, std::memory_order_release);
      return CUDA_SUCCESS;
    });
  });
}

void EnqueueWait(Stream* stream, CUdeviceptr address, uint32_t value) {
  const auto reached = [=] {
    return WithFlag(address, [=](std::atomic_ref<uint32_t> flag) {
      return static_cast<int32_t>(flag.load(std::memory_order_acquire) - value) >= 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    });
  };
  stream->Enqueue(Engine::kChannel, reached, [] { return Pass("execute:wait"); });
}

// Checks all operations before any is put into the stream, as the driver does.
CUresult CheckBatch(int device, unsigned int count, const CUstreamBatchMemOpParams* operations) {
  if (count == 0 || count >= 256) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned int i = 0; i < count; ++i) {
    const bool is_write = operations[i].operation == CU_STREAM_MEM_OP_WRITE_VALUE_32;
    if (!is_write && operations[i].operation != CU_STREAM_MEM_OP_WAIT_VALUE_32) return CUDA_ERROR_NOT_SUPPORTED;
    const unsigned int flags = is_write ? operations[i].writeValue.flags : operations[i].waitValue.flags;
    if (flags != 0) return CUDA_ERROR_NOT_SUPPORTED;
    if (const CUresult result = CheckFlag(device, operations[i].writeValue.address); result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

}  // namespace

bool IsDefaultStream(CUstream handle) { return handle == nullptr || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD; }

CUresult FindStream(CUstream handle, std::shared_ptr<Stream>* stream) {
  Context* context = nullptr;
  if (const CUresult result = CurrentContext(&context); result != CUDA_SUCCESS) return result;
  if (IsDefaultStream(handle)) {
    std::lock_guard<std::mutex> lock(context->mutex);
    *stream = context->default_stream;
    return CUDA_SUCCESS;
  }
  std::lock_guard<std::mutex> lock(Global().mutex);
  const auto found = Global().streams.find(handle);
  if (found == Global().streams.end() || found->second->context() != context) return CUDA_ERROR_INVALID_HANDLE;
  *stream = found->second;
  return CUDA_SUCCESS;
}

int LiveStreams() {
  std::lock_guard<std::mutex> lock(Global().mutex);
  return static_cast<int>(Global().streams.size());
}

int LiveEvents() {
  std::lock_guard<std::mutex> lock(Global().mutex);
  return static_cast<int>(Global().events.size());
}

}  // namespace fake_cuda

using namespace fake_cuda;  // NOLINT: the driver's functions are global

CUresult cuStreamCreateWithPriority(CUstream* handle, unsigned int, int priority) {
  FAKE_CUDA_ENTER(cuStreamCreateWithPriority);
  Context* context = nullptr;
  if (const CUresult result = CurrentContext(&context); result != CUDA_SUCCESS) return result;
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard<std::mutex> lock(context->mutex);
    const auto& channel = context->channels[context->streams_made++ % context->channels.size()];
    stream = std::make_shared<Stream>(context, channel, std::clamp(priority, kGreatestPriority, 0));
  }
  *handle = reinterpret_cast<CUstream>(stream.get());
  std::lock_guard<std::mutex> lock(Global().mutex);
  Global().streams[*handle] = std::move(stream);
  return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream handle) {
  FAKE_CUDA_ENTER(cuStreamDestroy);
  std::lock_guard<std::mutex> lock(Global().mutex);
  const auto found = Global().streams.find(handle);
  if (found == Global().streams.end()) return CUDA_ERROR_INVALID_HANDLE;
  found->second->Destroy();
  Global().streams.erase(found);
  return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream handle) {
  FAKE_CUDA_ENTER(cuStreamQuery);
  std::shared_ptr<Stream> stream;
  if (const CUresult result = FindStream(handle, &stream); result != CUDA_SUCCESS) return result;
  return stream->Done() ? stream->context()->error.load() : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamSynchronize(CUstream handle) {
  FAKE_CUDA_ENTER(cuStreamSynchronize);
  std::shared_ptr<Stream> stream;
  if (const CUresult result = FindStream(handle, &stream); result != CUDA_SUCCESS) return result;
  stream->AwaitAll();
  return stream->context()->error;
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned int) {
  FAKE_CUDA_ENTER(cuStreamWaitEvent);
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Event> event;
  if (const CUresult result = FindStream(handle, &stream); result != CUDA_SUCCESS) return result;
  if (const CUresult result = FindEvent(event_handle, &event); result != CUDA_SUCCESS) return result;
  std::shared_ptr<std::atomic<bool>> reached;
  {
    std::lock_guard<std::mutex> lock(Global().mutex);
    reached = event->reached;
  }
  if (reached == nullptr) return CUDA_SUCCESS;
  stream->Enqueue(Engine::kSameAsBefore, [reached] { return *reached ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY; }, [] { return CUDA_SUCCESS; });
  return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent* handle, unsigned int) {
  FAKE_CUDA_ENTER(cuEventCreate);
  auto event = std::make_shared<Event>();
  if (const CUresult result = CurrentContext(&event->context); result != CUDA_SUCCESS) return result;
  *handle = reinterpret_cast<CUevent>(event.get());
  std::lock_guard<std::mutex> lock(Global().mutex);
  Global().events[*handle] = std::move(event);
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent handle) {
  FAKE_CUDA_ENTER(cuEventDestroy);
  std::lock_guard<std::mutex> lock(Global().mutex);
  return Global().events.erase(handle) != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
  FAKE_CUDA_ENTER(cuEventRecord);
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Event> event;
  if (const CUresult result = FindStream(stream_handle, &stream); result != CUDA_SUCCESS) return result;
  if (const CUresult result = FindEvent(handle, &event); result != CUDA_SUCCESS) return result;
  if (event->context != stream->context()) return CUDA_ERROR_INVALID_HANDLE;
  auto reached = std::make_shared<std::atomic<bool>>(false);
  {
    std::lock_guard<std::mutex> lock(Global().mutex);
    event->reached = reached;
  }
  stream->Enqueue(Engine::kSameAsBefore, nullptr, [reached] {
    *reached = true;
    return CUDA_SUCCESS;
  });
  return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent handle) {
  FAKE_CUDA_ENTER(cuEventQuery);
  std::shared_ptr<Event> event;
  if (const CUresult result = FindEvent(handle, &event); result != CUDA_SUCCESS) return result;
  std::lock_guard<std::mutex> lock(Global().mutex);
  return event->reached == nullptr || *event->reached ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamWriteValue32(CUstream handle, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
  FAKE_CUDA_ENTER(cuStreamWriteValue32);
  std::shared_ptr<Stream> stream;
  if (const CUresult result = FindStream(handle, &stream); result != CUDA_SUCCESS) return result;
  if (flags != CU_STREAM_WRITE_VALUE_DEFAULT) return CUDA_ERROR_NOT_SUPPORTED;
  if (const CUresult result = CheckFlag(stream->context()->device, address); result != CUDA_SUCCESS) return result;
  EnqueueWrite(stream.get(), address, value);
  return CUDA_SUCCESS;
}

CUresult cuStreamWaitValue32(CUstream handle, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
  FAKE_CUDA_ENTER(cuStreamWaitValue32);
  std::shared_ptr<Stream> stream;
  if (const CUresult result = FindStream(handle, &stream); result != CUDA_SUCCESS) return result;
  if (flags != CU_STREAM_WAIT_VALUE_GEQ) return CUDA_ERROR_NOT_SUPPORTED;
  if (const CUresult result = CheckFlag(stream->context()->device, address); result != CUDA_SUCCESS) return result;
  EnqueueWait(stream.get(), address, value);
  return CUDA_SUCCESS;
}

CUresult cuStreamBatchMemOp(CUstream handle, unsigned int count, CUstreamBatchMemOpParams* operations, unsigned int flags) {
  FAKE_CUDA_ENTER(cuStreamBatchMemOp);
  std::shared_ptr<Stream> stream;
  if (const CUresult result = FindStream(handle, &stream); result != CUDA_SUCCESS) return result;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = CheckBatch(stream->context()->device, count, operations); result != CUDA_SUCCESS) return result;
  for (unsigned int i = 0; i < count; ++i) {
    if (operations[i].operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
      EnqueueWrite(stream.get(), operations[i].writeValue.address, operations[i].writeValue.value);
    } else {
      EnqueueWait(stream.get(), operations[i].waitValue.address, operations[i].waitValue.value);
    }
  }
  return CUDA_SUCCESS;
}

CUresult fakeCudaLaunch(CUstream handle, int microseconds) {
  std::shared_ptr<Stream> stream;
  if (const CUresult result = FindStream(handle, &stream); result != CUDA_SUCCESS) return result;
  stream->Enqueue(Engine::kChannel, nullptr, [microseconds] {
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    return Pass("execute:kernel");
  });
  return CUDA_SUCCESS;
}

CUresult fakeCudaLaunchFirst(CUstream handle) {
  std::shared_ptr<Stream> launching;
  if (const CUresult result = FindStream(handle, &launching); result != CUDA_SUCCESS) return result;
  Context* const context = launching->context();
  {
    std::unique_lock<std::shared_mutex> launches(context->launches);
    (void)Pass("first launch");
    std::vector<std::shared_ptr<Stream>> streams;
    {
      std::lock_guard<std::mutex> lock(Global().mutex);
      for (const auto& [name, stream] : Global().streams) {
        if (stream->context() == context) streams.push_back(stream);
      }
    }
    for (const std::shared_ptr<Stream>& stream : streams) stream->AwaitAll();
  }
  return fakeCudaLaunch(handle, 0);
}

int fakeCudaStreamPriority(CUstream handle) {
  std::lock_guard<std::mutex> lock(Global().mutex);
  return Global().streams.at(handle)->priority();
}
