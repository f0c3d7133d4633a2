// The kernels of gelu.cu, in the erf form.
#include "../gelu_erf.cuh"
#include "gelu.cu"
