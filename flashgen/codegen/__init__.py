"""Code generation: renders the kernels of a spec on a target.

targets              all facts about each GPU architecture: limits, rates, features, dtypes, families
family, families     the interfaces of a kernel family for each pass; the families, and which one a target uses
dispatch             the plan for the sizes of a call, and the kernels that a plan renders to
plan                 the interface of forward plans: tiles, registers, shared memory, checks against a target
shared_memory        the shared-memory layout of a CTA, from which byte counts, constants and drawings are derived
demand               registers and instructions that a variant needs per thread
padding, workload    padded head dims and limits of plans; the workloads that plans are compared for
candidates           the forward plans worth timing, ranked by a cost model; for tuning only
decode_candidates    the decode plans worth timing; backward_candidates: those of the backward
sizes                the sizes of a call, and formulas: numbers at a launch, expression trees of named sizes
formula_text         prints formulas as C++ for releases, and in English for headers and reports
arguments            the argument struct of a kernel: its C declaration and its layout
rendered_kernel      a stage: text, argument struct, threads, grid, values, cost, tile lists, workspaces
stages               the kernels of a pass in launch order, for calls, releases, show and verify
costs, header        FLOPs and bytes of each kernel as formulas; the comment at the top of its text
expressions/         the language as CUDA text: operators, operations, functions, derivatives, intervals
variant              the declarations of a spec as text: score function, mask, captures
visited              which key tiles a spec visits: a closed form, or tile lists
assembly             the context common to all templates, and the assembly of a kernel's text
environment          the Jinja environment, and the primitives that a text calls
source_text          parses entry points, argument struct and constants from a kernel's text
forward_kernel       contexts and records of the forward kernels of all families
backward_kernels     the same for the backward, with its preprocess and postprocess kernels
capture_gradient_kernels  the kernels that finish the gradients of captured arrays and sinks
batches              the batch layouts: members of argument structs, grids, workspaces, axes of tensor maps
varlen               the additions for varlen kernels: how a CTA finds its sequence
tile_list_kernel     the kernel that builds tile lists
merge_kernel         the kernel of merge_states; append_kernel: that of append_kv
mma_sync/, hopper/   plans and renderers of a family; mma_sync/ has the kernels of decode, of mixed batches and of dense
                     gradients for all targets, and what the decode of hopper/ shares with them (splits, ...)
"""
