"""Operations of training as kernels of our own in Triton, used where trials on the GPU found them right and faster."""
