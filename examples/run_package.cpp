// Runs a model that torch.export and AOTInductor compiled, without Python: passes one input, filled with ones, and
// prints the sum of the first output.
//
//   run_package libnormops.so model.pt2 size...
//
// Loading the library registers normops' operators; normops.build_info()["library"] is its path. To build:
//
//   TORCH=$(python -c "import torch; print(torch.__path__[0])")
//   g++ -std=c++20 run_package.cpp -o run_package -I$TORCH/include -I$TORCH/include/torch/csrc/api/include
//       -L$TORCH/lib -Wl,-rpath,$TORCH/lib -ltorch -ltorch_cpu -lc10
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <cstdio>
#include <string>
#include <vector>

int main(int count, char** arguments) {
  if (count < 3) {
    std::fprintf(stderr, "usage: run_package libnormops.so model.pt2 size...\n");
    return 2;
  }
  if (dlopen(arguments[1], RTLD_NOW) == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  std::vector<int64_t> shape;
  for (int i = 3; i < count; i++) shape.push_back(std::stoll(arguments[i]));

  const c10::InferenceMode inference;
  torch::inductor::AOTIModelPackageLoader loader(arguments[2]);
  const std::vector<at::Tensor> outputs = loader.run({at::ones(shape)});
  std::printf("%.6f\n", outputs.at(0).sum().item<double>());
}
