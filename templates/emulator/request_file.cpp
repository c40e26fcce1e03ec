// The entry of the sanitized modes: a program reads one launch from a file, runs it, and writes the result to another
// file. It is a process of its own, since sanitizers must be loaded at its start and end it at their first finding.
//
// Request, little-endian, as in flashgen/runtime/sanitized.py:
//   char magic[8] "FGEMU001"; u32 grid[3], block[3], shared_bytes, order, copies, argument_bytes, buffers, pointers;
//   u64 seed; argument bytes; per buffer: u64 bytes, u64 alignment_offset, the bytes;
//   per pointer: u32 argument_offset, u32 buffer, u64 offset in the buffer.
// Result: u32 failed, u32 message_bytes, u64 blocks, switches, collectives, async_copies; the message; the buffers'
// bytes.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "vector_types.h"
#include "interface.h"

namespace emulator {

struct Header {
  char magic[8];
  u32 grid[3], block[3], shared_bytes, order, copies, argument_bytes, buffers, pointers;
  u64 seed;
};

// A buffer of the kernel in an allocation of exactly its size, with red zones at both ends. An array that was not
// 16-byte aligned keeps its misalignment.
struct Buffer {
  char* allocation;
  u64 bytes, offset;
  char* data() const { return allocation + offset; }
};

struct Pointer {
  u32 argument_offset, buffer;
  u64 offset;
};

[[noreturn]] static void give_up(const char* what, const char* path) {
  fprintf(stderr, "flashgen emulator: %s: %s\n", what, path);
  exit(2);
}

static void read_exactly(FILE* file, void* data, size_t bytes, const char* path) {
  if (bytes && fread(data, 1, bytes, file) != bytes) give_up("request file is cut short", path);
}

static Buffer read_buffer(FILE* file, const char* path) {
  Buffer buffer{};
  read_exactly(file, &buffer.bytes, sizeof buffer.bytes, path);
  read_exactly(file, &buffer.offset, sizeof buffer.offset, path);
  buffer.allocation = static_cast<char*>(malloc(buffer.bytes + buffer.offset));
  read_exactly(file, buffer.data(), buffer.bytes, path);
  return buffer;
}

static void write_result(const char* path, const LaunchRequest& request, const std::vector<Buffer>& buffers) {
  FILE* file = fopen(path, "wb");
  if (!file) give_up("cannot write", path);
  u32 words[2] = {request.failed, request.failed ? u32(strlen(request.message)) : 0};
  u64 counts[4] = {request.blocks, request.switches, request.collectives, request.async_copies};
  fwrite(words, sizeof words, 1, file);
  fwrite(counts, sizeof counts, 1, file);
  fwrite(request.message, 1, words[1], file);
  for (const Buffer& buffer : buffers) fwrite(buffer.data(), 1, buffer.bytes, file);
  if (fclose(file) != 0) give_up("cannot write", path);
}

int run_request_file(int argc, char** argv, int (*launch_kernel)(LaunchRequest*)) {
  if (argc != 3) give_up("usage: PROGRAM REQUEST RESULT, not", argv[0]);
  const char* path = argv[1];
  FILE* file = fopen(path, "rb");
  if (!file) give_up("cannot read", path);
  Header header;
  read_exactly(file, &header, sizeof header, path);
  if (memcmp(header.magic, "FGEMU001", 8) != 0) give_up("not a request file", path);
  void* arguments = aligned_alloc(64, (header.argument_bytes + 63) / 64 * 64);
  read_exactly(file, arguments, header.argument_bytes, path);
  std::vector<Buffer> buffers;
  for (u32 i = 0; i < header.buffers; ++i) buffers.push_back(read_buffer(file, path));
  for (u32 i = 0; i < header.pointers; ++i) {
    Pointer pointer;
    read_exactly(file, &pointer, sizeof pointer, path);
    char* address = buffers[pointer.buffer].data() + pointer.offset;
    memcpy(static_cast<char*>(arguments) + pointer.argument_offset, &address, sizeof address);
  }
  fclose(file);
  static LaunchRequest request;
  memcpy(request.grid, header.grid, sizeof request.grid);
  memcpy(request.block, header.block, sizeof request.block);
  request.shared_bytes = header.shared_bytes;
  request.argument_bytes = header.argument_bytes;
  request.arguments = arguments;
  request.order = header.order;
  request.copies = header.copies;
  request.workers = 1;
  request.seed = header.seed;
  launch_kernel(&request);
  write_result(argv[2], request, buffers);
  return 0;
}

}  // namespace emulator
