// The kernels of gelu.cu for the erf form.
#define GELU_ERF
#include "gelu.cu"
