"""The trainer: one program for CPU and CUDA, one process or many."""

import warnings

# torch 2.8's hooks of DDP say this of themselves when Python 3.13 imports them.
warnings.filterwarnings("ignore", "functools.partial will be a method descriptor", FutureWarning)
