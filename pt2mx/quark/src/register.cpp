// The library of custom operators that a program of Quark registers with onnxruntime. It registers none: each node of a
// file that pt2mx wrote has a body of standard operators.

extern "C" void* RegisterCustomOps(void* /*options*/, const void* /*api*/) {
  return nullptr;  // no error
}
