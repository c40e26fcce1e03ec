// The whole runtime as one unit: most of its compile time is the standard library's headers, read once this way.
#include "own_memory_functions.cpp"  // first: the others call them
#include "fibers.cpp"
#include "ready_queue.cpp"
#include "scheduler.cpp"
#include "failure.cpp"
#include "warp_collectives.cpp"
#include "lane_exchange.cpp"
#include "block_barriers.cpp"
#include "shared_memory.cpp"
#include "async_copies.cpp"
#include "matrix.cpp"
#include "launch.cpp"
#include "request_file.cpp"
