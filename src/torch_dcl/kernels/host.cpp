// Replays the host's work of a unit: torch's operations and kernel launches that Python recorded once.
//
// A tape is a list of steps over numbered tensors: torch operations, kernels, allocations and views; the sizes of the
// latter two are recorded, so they need no operation. A program is a forward tape with its conditions: metadata of
// tensors, torch settings, and values in the dictionaries of modules. With gradients it becomes one autograd node, whose
// backward pass is a tape as well; Python records it with the first gradient, and computes double backward.
//
// A torch operation can be served by tapes too, one for each kind of arguments. Compiled networks call these.
//
// `record.py` makes tapes, `programs.py` programs. Nothing here depends on what a unit computes.

#include <dlfcn.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided_ops.h>
#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cstring>
#include <mutex>
#include <variant>

namespace {

using at::Tensor;
using c10::IValue;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePointer = decltype(torch::autograd::Edge::function);  // shared_ptr, in later versions of torch intrusive_ptr

struct Slot {
  int at;
};

bool is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return !Py_IsInitialized() || Py_IsFinalizing();
#else
  return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

// For owners of Python objects that an autograd thread without the GIL may release.
template <typename T>
std::shared_ptr<T> share(T* made) {
  return std::shared_ptr<T>(made, [](T* object) {
    if (is_ending()) return;
    py::gil_scoped_acquire locked;
    delete object;
  });
}

using Slots = std::vector<int>;  // -1 is no tensor

// ---------------------------------------------------------------------------------------------------------- CUDA

using LaunchKernel = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                             void**);
using CurrentStream = int32_t (*)(int32_t, void**);

template <typename Function>
Function find(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  return handle == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(handle, name));
}

void launch(void* function, const std::array<unsigned, 3>& grid, unsigned threads, unsigned shared, int device,
            void** values) {
  static const auto start = find<LaunchKernel>("libcuda.so.1", "cuLaunchKernel");
  static const auto current = find<CurrentStream>("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream");
  TORCH_CHECK(start != nullptr && current != nullptr, "CUDA's driver is not loaded");
  void* stream = nullptr;
  TORCH_CHECK(current(device, &stream) == 0, "no current CUDA stream");
  const int error = start(function, grid[0], grid[1], grid[2], threads, 1, 1, shared, stream, values, nullptr);
  TORCH_CHECK(error == 0, "a kernel could not be launched: CUDA error ", error);
}

// ---------------------------------------------------------------------------------------------------------- tapes

struct Operation {
  c10::OperatorHandle handle;
  std::vector<IValue> arguments;
  std::vector<std::pair<size_t, int>> tensors;
  std::vector<std::pair<size_t, Slots>> lists;
  Slots results;
};

struct Kernel {
  void* function = nullptr;  // null: call Python
  std::array<unsigned, 3> grid{};
  unsigned threads = 0, shared = 0;
  int device = 0;
  std::vector<uint64_t> values;
  std::vector<std::pair<size_t, int>> pointers;
  Slots tensors;
  py::object call;  // the same launch from Python, for pointers that are not multiples of 16
};

struct Allocation {  // without a boxed call of the dispatcher
  int slot;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  at::Device device;
};

struct View {  // recorded sizes and strides
  int base, slot;
  std::vector<int64_t> sizes, strides;
  int64_t offset;  // relative to the base's own
};

struct Step {
  std::variant<Operation, Kernel, Allocation, View> work;
  Slots last;  // tensors that no later step reads
};

IValue value_of(py::handle given, const c10::TypePtr& type);

template <typename T>
IValue list_of(py::handle given) {
  c10::List<T> list;
  for (auto item : given) list.push_back(item.cast<T>());
  return list;
}

IValue value_of(py::handle given, const c10::TypePtr& type) {
  if (given.is_none()) return IValue();
  PyObject* object = given.ptr();
  switch (type->kind()) {
    case c10::TypeKind::OptionalType:
      return value_of(given, type->castRaw<c10::OptionalType>()->getElementType());
    case c10::TypeKind::ListType:
      switch (type->castRaw<c10::ListType>()->getElementType()->kind()) {
        case c10::TypeKind::IntType:
        case c10::TypeKind::SymIntType:
          return list_of<int64_t>(given);
        case c10::TypeKind::BoolType:
          return list_of<bool>(given);
        case c10::TypeKind::FloatType:
          return list_of<double>(given);
        default:
          break;
      }
      break;
    case c10::TypeKind::DeviceObjType:
      if (THPDevice_Check(object)) return reinterpret_cast<THPDevice*>(object)->device;
      break;
    case c10::TypeKind::BoolType:
      return given.cast<bool>();
    case c10::TypeKind::FloatType:
      return given.cast<double>();
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::NumberType:
      if (THPDtype_Check(object)) return static_cast<int64_t>(reinterpret_cast<THPDtype*>(object)->scalar_type);
      if (THPLayout_Check(object)) return static_cast<int64_t>(reinterpret_cast<THPLayout*>(object)->layout);
      if (THPMemoryFormat_Check(object))
        return static_cast<int64_t>(reinterpret_cast<THPMemoryFormat*>(object)->memory_format);
      if (PyBool_Check(object)) return given.cast<bool>();
      if (PyFloat_Check(object)) return given.cast<double>();
      if (PyLong_Check(object)) return given.cast<int64_t>();
      break;
    default:
      break;
  }
  throw py::type_error("no value of " + type->str());
}

class Tape {
 public:
  Tape(size_t inputs, size_t slots, Slots outputs) : inputs_(inputs), slots_(slots), outputs_(std::move(outputs)) {}

  void operation(const std::string& name, const std::string& overload, const py::sequence& given, Slots results,
                 Slots last) {
    auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    Operation made{handle, {}, {}, {}, std::move(results)};
    size_t i = 0;
    for (auto item : given) {
      if (py::isinstance<Slot>(item)) {
        made.tensors.emplace_back(i, item.cast<Slot>().at);
        made.arguments.emplace_back();
      } else if (py::isinstance<py::list>(item) && py::len(item) > 0 && py::isinstance<Slot>(item[py::int_(0)])) {
        Slots list;
        for (auto slot : item) list.push_back(slot.cast<Slot>().at);
        made.lists.emplace_back(i, std::move(list));
        made.arguments.emplace_back();
      } else {
        made.arguments.push_back(value_of(item, handle.schema().arguments().at(i).type()));
      }
      ++i;
    }
    steps_.push_back({std::move(made), std::move(last)});
  }

  void kernel(py::object call, Slots tensors, uint64_t function, std::array<unsigned, 3> grid, unsigned threads,
              unsigned shared, int device, const std::vector<std::pair<std::string, py::object>>& values, Slots last) {
    Kernel made;
    made.call = std::move(call);
    made.tensors = std::move(tensors);
    made.function = reinterpret_cast<void*>(function);
    made.grid = grid, made.threads = threads, made.shared = shared, made.device = device;
    size_t pointers = 0;
    for (const auto& [kind, value] : values) {
      uint64_t bits = 0;
      if (kind == "pointer") {
        made.pointers.emplace_back(made.values.size(), made.tensors.at(pointers++));
      } else if (kind == "fp32") {
        const auto number = value.cast<float>();
        std::memcpy(&bits, &number, sizeof(number));
      } else if (kind == "i32") {
        const auto number = value.cast<int32_t>();
        std::memcpy(&bits, &number, sizeof(number));
      } else if (kind == "i64") {
        const auto number = value.cast<int64_t>();
        std::memcpy(&bits, &number, sizeof(number));
      } else if (kind != "null") {
        throw py::value_error("no argument of a kernel: " + kind);
      }
      made.values.push_back(bits);
    }
    steps_.push_back({std::move(made), std::move(last)});
  }

  void allocation(int slot, std::vector<int64_t> sizes, std::vector<int64_t> strides, const py::object& dtype,
                  const py::object& device, Slots last) {
    const auto place = reinterpret_cast<THPDevice*>(device.ptr())->device;
    if (!place.is_cuda() && !place.is_cpu()) throw py::value_error("no memory of " + place.str());
    steps_.push_back({Allocation{slot, std::move(sizes), std::move(strides),
                                 reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type, place},
                      std::move(last)});
  }

  void view(int base, int slot, std::vector<int64_t> sizes, std::vector<int64_t> strides, int64_t offset, Slots last) {
    steps_.push_back({View{base, slot, std::move(sizes), std::move(strides), offset}, std::move(last)});
  }

  variable_list run(const variable_list& inputs) const {
    TORCH_CHECK(inputs.size() == inputs_, "a tape of ", inputs_, " inputs was given ", inputs.size());
    variable_list slots(slots_);
    std::copy(inputs.begin(), inputs.end(), slots.begin());
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard plain(c10::autocast_dispatch_keyset);
    for (const auto& step : steps_) {
      std::visit([&slots](const auto& work) { run(work, slots); }, step.work);
      for (const int slot : step.last) slots[slot].reset();
    }
    variable_list outputs;
    outputs.reserve(outputs_.size());
    for (const int slot : outputs_) outputs.push_back(slot < 0 ? Tensor() : slots[slot]);
    return outputs;
  }

 private:
  static void run(const Operation& operation, variable_list& slots) {
    torch::jit::Stack stack = operation.arguments;
    for (const auto& [at, slot] : operation.tensors) stack[at] = slots[slot];
    for (const auto& [at, list] : operation.lists) {
      c10::List<Tensor> tensors;
      for (const int slot : list) tensors.push_back(slots[slot]);
      stack[at] = std::move(tensors);
    }
    operation.handle.callBoxed(stack);
    size_t next = 0;
    for (auto& result : stack) {
      if (result.isTensorList()) {
        for (Tensor tensor : result.toTensorList()) keep(operation.results, next++, std::move(tensor), slots);
      } else if (result.isTensor()) {
        keep(operation.results, next++, std::move(result).toTensor(), slots);
      } else {
        ++next;
      }
    }
  }

  static void run(const Allocation& made, variable_list& slots) {
    const c10::DispatchKeySet key(made.device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
    slots[made.slot] = at::_ops::empty_strided::redispatch(key, c10::fromIntArrayRefUnchecked(made.sizes),
                                                           c10::fromIntArrayRefUnchecked(made.strides), made.dtype,
                                                           at::kStrided, made.device, std::nullopt);
  }

  static void run(const View& view, variable_list& slots) {
    const Tensor& base = slots[view.base];
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                           base.key_set(), base.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes, view.strides, base.storage_offset() + view.offset);
    slots[view.slot] = std::move(made);
  }

  static void keep(const Slots& results, size_t index, Tensor tensor, variable_list& slots) {
    const int slot = results.at(index);
    if (slot >= 0) slots[slot] = std::move(tensor);
  }

  static void run(const Kernel& kernel, variable_list& slots) {
    constexpr size_t most = 64;
    if (kernel.function != nullptr && kernel.values.size() <= most) {
      std::array<uint64_t, most> values;
      std::array<void*, most> addresses;
      std::copy(kernel.values.begin(), kernel.values.end(), values.begin());
      uint64_t bits = 0;
      for (const auto& [at, slot] : kernel.pointers)
        bits |= values[at] = reinterpret_cast<uint64_t>(slots[slot].data_ptr());
      if ((bits & 15) == 0) {
        for (size_t i = 0; i < kernel.values.size(); ++i) addresses[i] = &values[i];
        launch(kernel.function, kernel.grid, kernel.threads, kernel.shared, kernel.device, addresses.data());
        return;
      }
    }
    py::gil_scoped_acquire locked;
    py::tuple given(kernel.tensors.size());
    for (size_t i = 0; i < kernel.tensors.size(); ++i) given[i] = slots[kernel.tensors[i]];
    kernel.call(*given);
  }

  size_t inputs_, slots_;
  Slots outputs_;
  std::vector<Step> steps_;
};

// -------------------------------------------------------------------------------------------------------- guards

struct Metadata {
  explicit Metadata(const Tensor& tensor) : defined(tensor.defined()) {
    if (!defined) return;
    keys = tensor.key_set(), dtype = tensor.scalar_type(), device = tensor.device();
    sizes = tensor.sizes().vec(), strides = tensor.strides().vec();
  }

  bool holds(const Tensor& tensor) const {
    if (!tensor.defined()) return !defined;
    return defined && tensor.key_set() == keys && tensor.scalar_type() == dtype && tensor.device() == device &&
           tensor.sizes() == sizes && tensor.strides() == strides;
  }

  bool defined;
  c10::DispatchKeySet keys;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  std::vector<int64_t> sizes, strides;
};

struct Entry {  // a key of a dictionary; the layer's own dictionary is looked up in every call
  py::object dictionary, key;

  PyObject* get(PyObject* own) const {  // borrowed
    PyObject* found = PyDict_GetItemWithError(dictionary.is_none() ? own : dictionary.ptr(), key.ptr());
    if (found == nullptr) PyErr_Clear();
    return found;
  }
};

struct Condition {
  std::string kind;
  Entry entry;
  py::object expected;

  bool holds(PyObject* own) const {
    if (kind == "type") return reinterpret_cast<PyObject*>(Py_TYPE(entry.dictionary.ptr())) == expected.ptr();
    if (kind == "call") {
      py::object found = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(entry.dictionary.ptr()));
      if (!found) throw py::error_already_set();
      return equal(found.ptr());
    }
    PyObject* found = entry.get(own);
    if (found == nullptr) return kind == "absent";
    if (kind == "empty") return PyObject_Not(found) == 1;
    return kind == "equal" && equal(found);
  }

  bool equal(PyObject* found) const {
    if (found == expected.ptr()) return true;
    if (Py_TYPE(found) != Py_TYPE(expected.ptr())) return false;
    // Modules compare by identity, which was checked first; numbers and tuples of numbers by value.
    const int same = PyObject_RichCompareBool(found, expected.ptr(), Py_EQ);
    if (same < 0) PyErr_Clear();
    return same == 1;
  }
};

// Not a subclass, whose operations may differ.
const Tensor* plain_tensor(PyObject* object, PyObject* parameter) {
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type != parameter && !THPVariable_CheckExact(object)) return nullptr;
  return &THPVariable_Unpack(object);
}

// ------------------------------------------------------------------------------------------------------ programs

struct Backward {
  std::vector<bool> needs;
  Metadata grad;
  std::shared_ptr<Tape> tape;
};

struct Program {
  std::vector<Condition> conditions;
  std::vector<Entry> sources;  // of all inputs of the tape but the first, the input of the layer
  std::vector<Metadata> metadata;
  bool learns = false, autocast = false;
  at::ScalarType autocast_dtype = at::kFloat, dtype = at::kFloat;
  std::shared_ptr<Tape> tape;
  Slots differentiable;  // inputs with gradients, in the order of the gradients
  Slots saved;           // inputs, continued by outputs of the tape (the first of these is the result), or -1
  Slots held;            // inputs without gradients that double backward needs
  py::object backward;   // (grad, saved, held, needs, create_graph) -> gradients, tape or None

  std::mutex mutex;
  std::vector<Backward> known;

  std::shared_ptr<Tape> find(const std::vector<bool>& needs, const Tensor& grad) {
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto& one : known) {
      if (one.needs == needs && one.grad.holds(grad)) return one.tape;
    }
    return nullptr;
  }

  void add(const std::vector<bool>& needs, const Tensor& grad, std::shared_ptr<Tape> made) {
    std::lock_guard<std::mutex> lock(mutex);
    if (known.size() >= 8) known.erase(known.begin());
    known.push_back({needs, Metadata(grad), std::move(made)});
  }
};

class UnitBackward : public Node {
 public:
  std::shared_ptr<Program> program;
  std::vector<SavedVariable> saved;
  variable_list held;

  std::string name() const override {
    return "DCLUnitBackward";
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved) variable.reset_data();
    released_ = true;
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t count = program->differentiable.size();
    if (!grads[0].defined()) return variable_list(count);
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    std::vector<bool> needs(count);
    for (size_t i = 0; i < count; ++i) needs[i] = task_should_compute_output(i);
    variable_list given;
    given.reserve(saved.size() + 1);
    given.push_back(grads[0]);
    for (auto& variable : saved) given.push_back(variable.unpack());
    const bool twice = at::GradMode::is_enabled();
    if (!twice) {
      if (auto tape = program->find(needs, grads[0])) return tape->run(given);
    }
    py::gil_scoped_acquire locked;
    given.erase(given.begin());
    const py::tuple found = program->backward(grads[0], given, held, needs, twice);
    if (!found[1].is_none()) program->add(needs, grads[0], found[1].cast<std::shared_ptr<Tape>>());
    variable_list gradients;
    for (auto gradient : found[0]) gradients.push_back(gradient.is_none() ? Tensor() : gradient.cast<Tensor>());
    return gradients;
  }

 private:
  std::mutex mutex_;
  bool released_ = false;
};

template <typename Made, typename Pointer>
Pointer make_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return Pointer(new Made, [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Made>();
  }
}

// Whether something must observe every operation: a mode, a transform or a tracer.
bool observed() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() || at::impl::PythonTorchFunctionTLS::stack_len() > 0 ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer);
}

class Programs {
 public:
  Programs(py::object owner, py::object parameter) : owner_(std::move(owner)), parameter_(std::move(parameter)) {}

  void add(std::shared_ptr<Program> program) {
    if (programs_.size() >= 16) programs_.erase(programs_.begin());
    programs_.push_back(std::move(program));
  }

  size_t size() const {
    return programs_.size();
  }

  bool belongs_to(const py::object& layer) const {
    return owner_().ptr() == layer.ptr();
  }

  // z, or None if no program matches this call.
  py::object run(const py::object& layer, const py::object& input) {
    if (programs_.empty() || !belongs_to(layer) || observed()) return py::none();
    const Tensor* x = plain_tensor(input.ptr(), parameter_.ptr());
    if (x == nullptr || !x->defined()) return py::none();
    const auto kind = x->device().type();
    const bool learns = at::GradMode::is_enabled(), autocast = at::autocast::is_autocast_enabled(kind);
    if (kind != at::kCPU && c10::impl::VirtualGuardImpl(kind).getDevice() != x->device()) return py::none();
    py::object own = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(layer.ptr(), nullptr));
    variable_list inputs;
    for (auto program = programs_.rbegin(); program != programs_.rend(); ++program) {
      if ((*program)->learns != learns || (*program)->autocast != autocast || !(*program)->metadata[0].holds(*x))
        continue;
      if (autocast && (*program)->autocast_dtype != at::autocast::get_autocast_dtype(kind)) continue;
      if (!gather(**program, own.ptr(), *x, inputs)) continue;
      auto chosen = *program;
      Tensor z;
      {
        py::gil_scoped_release unlocked;
        z = compute(chosen, inputs);
      }
      return py::cast(z);
    }
    return py::none();
  }

 private:
  bool gather(const Program& program, PyObject* own, const Tensor& x, variable_list& inputs) const {
    for (const auto& condition : program.conditions) {
      if (!condition.holds(own)) return false;
    }
    inputs.clear();
    inputs.reserve(program.sources.size() + 1);
    inputs.push_back(x);
    for (const auto& source : program.sources) {
      PyObject* object = source.get(own);
      if (object == nullptr) return false;
      if (object == Py_None) {
        inputs.emplace_back();
      } else {
        const Tensor* tensor = plain_tensor(object, parameter_.ptr());
        if (tensor == nullptr) return false;
        inputs.push_back(*tensor);
      }
      if (!program.metadata[inputs.size() - 1].holds(inputs.back())) return false;
    }
    return true;
  }

  static Tensor compute(const std::shared_ptr<Program>& program, variable_list& inputs) {
    if (inputs[0].scalar_type() != program->dtype) inputs[0] = inputs[0].to(program->dtype);  // a node of its own
    NodePointer node;
    if (program->learns) {
      variable_list differentiable;
      differentiable.reserve(program->differentiable.size());
      for (const int i : program->differentiable) differentiable.push_back(inputs[i]);
      if (torch::autograd::compute_requires_grad(at::TensorList(differentiable))) {
        node = make_node<UnitBackward, NodePointer>();
        node->set_next_edges(torch::autograd::collect_next_edges(at::TensorList(differentiable)));
      }
    }
    variable_list outputs = program->tape->run(inputs);
    if (node == nullptr) return std::move(outputs[0]);
    auto& unit = static_cast<UnitBackward&>(*node);
    unit.program = program;
    unit.saved.reserve(program->saved.size());
    const int count = static_cast<int>(inputs.size());
    for (const int i : program->saved) {
      unit.saved.emplace_back(i < 0 ? Tensor() : i < count ? inputs[i] : outputs[i - count], false);
    }
    for (const int i : program->held) unit.held.push_back(inputs[i]);
    torch::autograd::set_history(outputs[0], node);
    return std::move(outputs[0]);
  }

  py::object owner_, parameter_;  // a weak reference to the layer, and torch's class of parameters
  std::vector<std::shared_ptr<Program>> programs_;
};

std::shared_ptr<Program> make_program(
    const std::vector<std::tuple<std::string, py::object, py::object, py::object>>& conditions,
    const std::vector<std::pair<py::object, py::object>>& sources, const std::vector<py::object>& inputs, bool learns,
    const py::object& autocast, const py::object& dtype, std::shared_ptr<Tape> tape, Slots differentiable, Slots saved,
    Slots held, py::object backward) {
  auto made = share(new Program);
  for (const auto& [kind, dictionary, key, expected] : conditions) {
    made->conditions.push_back({kind, {dictionary, key}, expected});
  }
  for (const auto& [dictionary, key] : sources) made->sources.push_back({dictionary, key});
  for (const auto& input : inputs) made->metadata.emplace_back(input.is_none() ? Tensor() : input.cast<Tensor>());
  made->learns = learns;
  made->autocast = !autocast.is_none();
  if (made->autocast) made->autocast_dtype = reinterpret_cast<THPDtype*>(autocast.ptr())->scalar_type;
  made->dtype = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
  made->tape = std::move(tape);
  made->differentiable = std::move(differentiable), made->saved = std::move(saved), made->held = std::move(held);
  made->backward = std::move(backward);
  return made;
}

// ---------------------------------------------------------------------------------------------------- operations

// Serves an operation by its tapes, one for each kind of arguments.
class Service {
 public:
  Service(std::string name, py::object record, py::object tf32)
      : name_(std::move(name)), record_(std::move(record)), tf32_(std::move(tf32)) {}

  void run(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
    const size_t count = handle.schema().arguments().size();
    const auto arguments = torch::jit::last(*stack, count);
    variable_list tensors;
    tensors.reserve(count);
    for (const auto& argument : arguments) {
      if (argument.isTensor()) {
        tensors.push_back(argument.toTensor());
      } else if (argument.isTensorList()) {
        for (Tensor tensor : argument.toTensorList()) tensors.push_back(std::move(tensor));
      }
    }
    bool tf32 = false;
    if (is_float(tensors)) {
      py::gil_scoped_acquire locked;
      tf32 = tf32_().cast<bool>();
    }
    const auto tape = find(tensors, tf32, count, [&](size_t i, const IValue& known) { return same(known, arguments[i]); });
    variable_list results = tape == nullptr ? record(arguments, tensors, tf32) : tape->run(tensors);
    torch::jit::drop(*stack, count);
    if (returns_list(handle.schema())) {
      stack->emplace_back(c10::List<Tensor>(at::ArrayRef<Tensor>(results)));
    } else {
      for (auto& result : results) stack->emplace_back(std::move(result));
    }
  }

  // The results of a call from Python, or null if no tape matches.
  PyObject* call(PyObject* const* arguments, size_t count) {
    if (observed()) return nullptr;
    variable_list tensors;
    tensors.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      const Tensor* tensor = plain_tensor(arguments[i], parameter_.ptr());
      if (tensor != nullptr) tensors.push_back(*tensor);
    }
    const bool tf32 = is_float(tensors) && tf32_().cast<bool>();
    const auto tape = find(tensors, tf32, count, [&](size_t i, const IValue& known) { return same(known, arguments[i]); });
    if (tape == nullptr) return nullptr;
    variable_list results;
    {
      py::gil_scoped_release unlocked;
      at::RecordFunction seen(at::RecordScope::FUNCTION);
      if (seen.isActive()) seen.before(name_.c_str());
      results = tape->run(tensors);
    }
    if (!returns_list_ && results.size() == 1) return THPVariable_Wrap(std::move(results[0]));
    PyObject* sequence = returns_list_ ? PyList_New(results.size()) : PyTuple_New(results.size());
    for (size_t i = 0; sequence != nullptr && i < results.size(); ++i) {
      PyObject* wrapped = THPVariable_Wrap(std::move(results[i]));
      returns_list_ ? PyList_SET_ITEM(sequence, i, wrapped) : PyTuple_SET_ITEM(sequence, i, wrapped);
    }
    return sequence;
  }

 private:
  struct Known {
    std::vector<Metadata> metadata;
    std::vector<IValue> others;  // one per argument: none for a tensor, the length for a list
    bool tf32;
    std::shared_ptr<Tape> tape;
  };

  template <typename Same>
  std::shared_ptr<Tape> find(const variable_list& tensors, bool tf32, size_t count, const Same& is_same) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& one : known_) {
      if (one.metadata.size() != tensors.size() || one.tf32 != tf32 || one.others.size() != count) continue;
      bool holds = true;
      for (size_t i = 0; holds && i < tensors.size(); ++i) holds = one.metadata[i].holds(tensors[i]);
      for (size_t i = 0; holds && i < count; ++i) holds = is_same(i, one.others[i]);
      if (holds) return one.tape;
    }
    return nullptr;
  }

  static bool is_float(const variable_list& tensors) {
    return !tensors.empty() && tensors[0].scalar_type() == at::kFloat;
  }

  static bool returns_list(const c10::FunctionSchema& schema) {
    return schema.returns().size() == 1 && schema.returns()[0].type()->kind() == c10::TypeKind::ListType;
  }

  static IValue other(const IValue& argument) {
    if (argument.isTensor()) return TENSOR;
    if (argument.isTensorList()) return static_cast<int64_t>(argument.toTensorList().size());
    return argument;
  }

  static bool same(const IValue& known, const IValue& given) {
    if (given.isTensor()) return is_tensor(known);
    if (given.isTensorList()) return known.isInt() && known.toInt() == static_cast<int64_t>(given.toTensorList().size());
    if (given.isString()) return known.isString() && known.toStringRef() == given.toStringRef();
    if (given.isInt()) return known.isInt() && known.toInt() == given.toInt();
    if (given.isDouble()) return known.isDouble() && known.toDouble() == given.toDouble();
    if (given.isBool()) return known.isBool() && known.toBool() == given.toBool();
    if (given.isIntList()) return known.isIntList() && known.toIntVector() == given.toIntVector();
    return given.isNone() && known.isNone();
  }

  // False for anything but numbers, texts and tensors, and for other types than the recorded ones.
  bool same(const IValue& known, PyObject* given) const {
    if (given == Py_None) return known.isNone();
    if (plain_tensor(given, parameter_.ptr()) != nullptr) return is_tensor(known);
    if (PyUnicode_CheckExact(given)) {
      Py_ssize_t size = 0;
      const char* text = PyUnicode_AsUTF8AndSize(given, &size);
      if (text == nullptr) PyErr_Clear();
      return text != nullptr && known.isString() && known.toStringRef() == std::string_view(text, size);
    }
    if (PyFloat_CheckExact(given)) return known.isDouble() && known.toDouble() == PyFloat_AS_DOUBLE(given);
    if (PyBool_Check(given)) return known.isBool() && known.toBool() == (given == Py_True);
    if (PyLong_CheckExact(given)) {
      int overflow = 0;
      return known.isInt() && known.toInt() == PyLong_AsLongLongAndOverflow(given, &overflow) && overflow == 0;
    }
    if (THPDtype_Check(given)) {
      return known.isInt() && known.toInt() == static_cast<int64_t>(reinterpret_cast<THPDtype*>(given)->scalar_type);
    }
    return false;
  }

  static bool is_tensor(const IValue& known) {
    return known.isString() && known.toStringRef() == TENSOR;
  }

  variable_list record(at::ArrayRef<IValue> arguments, const variable_list& tensors, bool tf32) {
    py::gil_scoped_acquire locked;
    py::list given;
    for (const auto& argument : arguments) {
      if (argument.isTensor()) {
        given.append(argument.toTensor());
      } else if (argument.isTensorList()) {
        given.append(py::cast(argument.toTensorVector()));
      } else if (argument.isString()) {
        given.append(argument.toStringRef());
      } else if (argument.isInt()) {
        given.append(argument.toInt());
      } else if (argument.isDouble()) {
        given.append(argument.toDouble());
      } else if (argument.isBool()) {
        given.append(argument.toBool());
      } else if (argument.isIntList()) {
        given.append(py::cast(argument.toIntVector()));
      } else {
        given.append(py::none());
      }
    }
    const py::tuple found = record_(*given);
    if (!found[1].is_none()) {
      Known made{{}, {}, tf32, found[1].cast<std::shared_ptr<Tape>>()};
      for (const auto& tensor : tensors) made.metadata.emplace_back(tensor);
      for (const auto& argument : arguments) made.others.push_back(other(argument));
      std::lock_guard<std::mutex> lock(mutex_);
      if (known_.size() >= 512) known_.erase(known_.begin());
      known_.push_back(std::move(made));
    }
    return found[0].cast<variable_list>();
  }

  static constexpr const char* TENSOR = "tensor";
  const std::string name_;
  const py::object record_, tf32_;  // the latter says whether torch may take TF32 for products of float32
  const py::object parameter_ = py::module_::import("torch.nn").attr("Parameter");
  const bool returns_list_ = returns_list(
      c10::Dispatcher::singleton().findSchemaOrThrow(("torch_dcl::" + name_).c_str(), "").schema());
  std::mutex mutex_;
  std::vector<Known> known_;
};

class Served : public c10::OperatorKernel {
 public:
  explicit Served(Service& service) : service_(service) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
    service_.run(handle, stack);
  }

 private:
  Service& service_;
};

// An operation as Python calls it, without torch's way from Python to an operation, which takes several microseconds.
// `self` has the service, and what to call where it has no tape.
PyObject* call_served(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  HANDLE_TH_ERRORS
  auto* service = static_cast<Service*>(PyCapsule_GetPointer(PyTuple_GET_ITEM(self, 0), nullptr));
  PyObject* found = names == nullptr ? service->call(arguments, count) : nullptr;
  if (found != nullptr || PyErr_Occurred()) return found;
  return PyObject_Vectorcall(PyTuple_GET_ITEM(self, 1), arguments, count, names);
  END_HANDLE_TH_ERRORS
}

PyMethodDef method_of_served = {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call_served)),
                                METH_FASTCALL | METH_KEYWORDS, nullptr};

// Operations are removed when the process ends, after Python: what serves them is never released.
py::object serve(const std::string& name, const std::vector<std::string>& keys, py::object record, py::object tf32,
                 py::object otherwise) {
  auto* service = new Service(name, std::move(record), std::move(tf32));
  for (const auto& key : keys) {
    auto* library = new torch::Library(torch::Library::IMPL, "torch_dcl", c10::parseDispatchKey(key), __FILE__, __LINE__);
    library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Served>(*service)));
  }
  const py::tuple self = py::make_tuple(py::capsule(service), std::move(otherwise));
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method_of_served, self.ptr()));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("serve", &serve);
  py::class_<Slot>(m, "Slot").def(py::init<int>());
  py::class_<Tape, std::shared_ptr<Tape>>(m, "Tape")
      .def(py::init([](size_t inputs, size_t slots, Slots outputs) {
        return share(new Tape(inputs, slots, std::move(outputs)));
      }))
      .def("operation", &Tape::operation)
      .def("kernel", &Tape::kernel)
      .def("allocation", &Tape::allocation)
      .def("view", &Tape::view)
      .def("run", [](const Tape& tape, const std::vector<py::object>& inputs) {
        variable_list given;
        for (const auto& input : inputs) given.push_back(input.is_none() ? Tensor() : input.cast<Tensor>());
        py::gil_scoped_release unlocked;
        return tape.run(given);
      });
  py::class_<Program, std::shared_ptr<Program>>(m, "Program").def(py::init(&make_program));
  py::class_<Programs>(m, "Programs", py::dynamic_attr())
      .def(py::init<py::object, py::object>())
      .def("add", &Programs::add)
      .def("belongs_to", &Programs::belongs_to)
      .def("__len__", &Programs::size)
      .def("__call__", &Programs::run)
      // A copy of a layer, or one from a file, records its own.
      .def("__deepcopy__", [](const Programs&, const py::object&) { return py::none(); })
      .def("__reduce__", [](const Programs&) { return py::make_tuple(py::type::of(py::none()), py::tuple()); });
}
