#pragma once
#define AT_PARALLEL_OPENMP 1
