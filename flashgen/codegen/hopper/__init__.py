"""Kernels that use Hopper's own instructions: TMA, wgmma, mbarriers and setmaxnreg."""
