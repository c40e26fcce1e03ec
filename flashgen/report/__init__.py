"""The report on a spec's kernels, as one page of HTML or as data, for `flashgen report`."""
