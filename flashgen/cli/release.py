"""`flashgen release`: kernels built beforehand, for machines that compile nothing."""
