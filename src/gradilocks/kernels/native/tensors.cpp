// Addresses of torch's tensors, read through the functions of DLPack, without headers of Python or torch.
#include "parallel.h"

// DLTensor of DLPack 1.
struct DLTensor {
  void* data;
  int32_t device_type, device_id, dimensions;
  uint8_t type_code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t offset;
};

namespace {

// Lower addresses are offsets in freed storage, and few valid ones: `addresses.py` looks at the tensors themselves.
constexpr int64_t LOW_ADDRESS = int64_t{1} << 40;
constexpr int64_t EMPTY = 16;

}  // namespace

// Reads the addresses of the n tensors in a Python list: 0 for None, EMPTY for a tensor without elements.
//
// layouts: device, dtype, shape and strides of tensor i, from layouts[begins[i]] on; written if `records`, else
// compared. Returns 0, or -1 if a layout differs, an address is low, or `item` or `read` has set a Python exception.
EXPORT int gl_read_addresses(void* (*item)(void*, intptr_t), int (*read)(void*, DLTensor*), const void* none,
                             int64_t* layouts, const int64_t* begins, int64_t* addresses, int records, void* list,
                             int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    void* object = item(list, i);
    if (object == none) {
      addresses[i] = 0;
      continue;
    }
    DLTensor tensor;
    if (object == nullptr || read(object, &tensor) != 0 || begins[i] + 2 + 2 * tensor.dimensions != begins[i + 1]) {
      return -1;
    }
    int64_t *layout = layouts + begins[i], elements = 1;
    bool is_equal = true;
    const auto visit = [&](int64_t number) {
      *layout = records ? number : *layout;
      is_equal &= *layout++ == number;
    };
    visit(int64_t{tensor.device_type} << 32 | tensor.device_id);
    visit(int64_t{tensor.type_code} << 8 | tensor.bits);
    for (int32_t k = 0; k < tensor.dimensions; ++k) {
      visit(tensor.shape[k]);
      visit(tensor.shape[k] > 1 ? tensor.strides[k] : 0);
      elements *= tensor.shape[k];
    }
    const int64_t address = reinterpret_cast<int64_t>(tensor.data) + static_cast<int64_t>(tensor.offset);
    if (!is_equal || (elements != 0 && address < LOW_ADDRESS)) {
      return -1;
    }
    addresses[i] = elements == 0 ? EMPTY : address;
  }
  return 0;
}
