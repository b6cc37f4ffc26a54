// Runs a package that `pt2mx compile` wrote:
//
//     host model.aoti.pt2 inputs.pt outputs.pt
//
// inputs.pt is a list of tensors that torch.save wrote; torch.load reads outputs.pt, a tuple. No Python is involved:
// the program is linked with libtorch, and with libpt2mx_ops.so, which registers pt2mx's operators when it is loaded.

#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>

#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/serialize.h>

// Appends the tensors of nested tuples, lists and dictionaries.
static void flatten(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) tensors.push_back(value.toTensor());
  if (value.isTuple())
    for (const c10::IValue& part : value.toTupleRef().elements()) flatten(part, tensors);
  if (value.isList())
    for (const c10::IValue& part : value.toListRef()) flatten(part, tensors);
  if (value.isGenericDict())
    for (const auto& entry : value.toGenericDict()) flatten(entry.value(), tensors);
}

// Throws where an input has another dtype or shape than the package takes: its machine code checks neither.
static void check(const std::vector<at::Tensor>& inputs, const std::string& package) {
  caffe2::serialize::PyTorchStreamReader archive(package);
  const std::string name = "data/sample_inputs/model.pt";
  if (!archive.hasRecord(name)) return;  // `pt2mx compile` writes it
  const auto [data, size] = archive.getRecord(name);
  const char* bytes = static_cast<const char*>(data.get());
  const auto signature = torch::pickle_load(std::vector<char>(bytes, bytes + size)).toGenericDict();
  std::vector<at::Tensor> examples;
  flatten(signature.at("args"), examples);
  flatten(signature.at("kwargs"), examples);
  std::vector<c10::IValue> ranges;  // of each tensor the least and the most of each size; None is no limit
  for (const c10::IValue& range : signature.at("ranges").toListRef())
    if (!range.isNone()) ranges.push_back(range);
  if (inputs.size() != examples.size() || ranges.size() != examples.size())
    throw std::runtime_error("the package takes " + std::to_string(examples.size()) + " tensors");
  for (size_t i = 0; i < inputs.size(); i++) {
    const auto sizes = ranges[i].toListRef();
    bool fits = inputs[i].scalar_type() == examples[i].scalar_type() && size_t(inputs[i].dim()) == sizes.size();
    for (size_t d = 0; fits && d < sizes.size(); d++) {
      const auto& limits = sizes[d].toTupleRef().elements();
      const int64_t n = inputs[i].size(int64_t(d));
      fits = limits[0].toInt() <= n && (limits[1].isNone() || n <= limits[1].toInt());
    }
    if (fits) continue;
    std::ostringstream text;
    text << "input " << i << " is " << inputs[i].toString() << inputs[i].sizes() << ": the package takes "
         << examples[i].toString() << " with sizes from and to " << ranges[i];
    throw std::runtime_error(text.str());
  }
}

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
    check(inputs, arguments[1]);

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
