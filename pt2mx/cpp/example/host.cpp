// Runs a package that `pt2mx compile` wrote:
//
//     host model.aoti.pt2 inputs.pt outputs.pt
//
// inputs.pt is a list of tensors that torch.save wrote; torch.load reads outputs.pt, a tuple. No Python is involved:
// the program is linked with libtorch, and with libpt2mx_ops.so, which registers pt2mx's operators when it is loaded.

#include <fstream>
#include <iostream>
#include <iterator>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/serialize.h>

int main(int count, char** arguments) {
  if (count != 4) {
    std::cerr << "usage: host PACKAGE INPUTS OUTPUTS\n";
    return 2;
  }
  try {
    for (char* path : {arguments[1], arguments[2]})
      if (!std::ifstream(path)) throw std::runtime_error(std::string("cannot read ") + path);
    std::ifstream given(arguments[2], std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(given), {}};
    const c10::IValue list = torch::pickle_load(bytes);
    std::vector<at::Tensor> inputs;
    for (const c10::IValue& value : list.toListRef()) inputs.push_back(value.toTensor());

    const c10::InferenceMode inference;
    torch::inductor::AOTIModelPackageLoader model(arguments[1]);
    const std::vector<at::Tensor> outputs = model.run(inputs);

    const std::vector<c10::IValue> values(outputs.begin(), outputs.end());
    const std::vector<char> results = torch::pickle_save(c10::ivalue::Tuple::create(values));
    std::ofstream file(arguments[3], std::ios::binary);
    if (!file.write(results.data(), std::streamsize(results.size())).flush())
      throw std::runtime_error(std::string("cannot write ") + arguments[3]);
  } catch (const c10::Error& error) {
    std::cerr << "host: " << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "host: " << error.what() << "\n";
    return 1;
  }
}
