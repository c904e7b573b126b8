"""One large network trained by all ranks together: the loop, its parts, and the ranks that follow the first."""
