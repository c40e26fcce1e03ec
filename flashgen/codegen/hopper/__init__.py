"""The family of Hopper's own instructions: TMA, wgmma, mbarriers, setmaxnreg."""
