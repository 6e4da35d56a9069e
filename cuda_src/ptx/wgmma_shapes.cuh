// Warpgroup matrix multiply, m64 x n x k16, fp32 accumulation, 16-bit operands. PTX ISA 9.7.15.5.2
// (wgmma.mma_async).
//
// shared_shared reads both operands from shared memory, register_shared takes the left one from
// registers, in the layout of mma.m16n8k16. Shared operands are K-major; the right one can be
// transposed.
// accumulate = 0 overwrites the accumulators. Warp w has rows 16 w .. 16 w + 15, as mma has them.
//
// An asm statement cannot be built from a template parameter, so each width is a line at the end: its
// accumulators, as text and as operands, and the numbers of the operands that follow them.
#pragma once

#include "base/types.cuh"

namespace dlattn {

template <int columns>
struct WgmmaShape;

// clang-format off: one line a width

#define DLATTN_TEXT_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define DLATTN_TEXT_24 DLATTN_TEXT_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define DLATTN_TEXT_32 DLATTN_TEXT_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define DLATTN_TEXT_48 DLATTN_TEXT_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define DLATTN_TEXT_56 DLATTN_TEXT_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define DLATTN_TEXT_64 DLATTN_TEXT_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define DLATTN_TEXT_80 DLATTN_TEXT_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define DLATTN_TEXT_96 DLATTN_TEXT_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define DLATTN_TEXT_128 DLATTN_TEXT_96 \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
    ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define DLATTN_EIGHT(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
    "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define DLATTN_OPERANDS_16 DLATTN_EIGHT(0), DLATTN_EIGHT(8)
#define DLATTN_OPERANDS_24 DLATTN_OPERANDS_16, DLATTN_EIGHT(16)
#define DLATTN_OPERANDS_32 DLATTN_OPERANDS_24, DLATTN_EIGHT(24)
#define DLATTN_OPERANDS_48 DLATTN_OPERANDS_32, DLATTN_EIGHT(32), DLATTN_EIGHT(40)
#define DLATTN_OPERANDS_56 DLATTN_OPERANDS_48, DLATTN_EIGHT(48)
#define DLATTN_OPERANDS_64 DLATTN_OPERANDS_56, DLATTN_EIGHT(56)
#define DLATTN_OPERANDS_80 DLATTN_OPERANDS_64, DLATTN_EIGHT(64), DLATTN_EIGHT(72)
#define DLATTN_OPERANDS_96 DLATTN_OPERANDS_80, DLATTN_EIGHT(80), DLATTN_EIGHT(88)
#define DLATTN_OPERANDS_128 DLATTN_OPERANDS_96, DLATTN_EIGHT(96), DLATTN_EIGHT(104), \
    DLATTN_EIGHT(112), DLATTN_EIGHT(120)

#define DLATTN_INSTRUCTION(columns, type, predicate) \
  "{.reg .pred p; setp.ne.b32 p, %" #predicate ", 0; " \
  "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " "

#define DLATTN_SHARED_SHARED(columns, count, type, n0, n1, n2, n3) \
  asm volatile(DLATTN_INSTRUCTION(columns, type, n2) "{" DLATTN_TEXT_##count "}," \
               "%" #n0 ",%" #n1 ",p,1,1,0,%" #n3 ";}" \
               : DLATTN_OPERANDS_##count \
               : "l"(a), "l"(b), "r"(accumulate), "n"(transposed))

#define DLATTN_REGISTER_SHARED(columns, count, type, n0, n1, n2, n3, n4, n5, n6) \
  asm volatile(DLATTN_INSTRUCTION(columns, type, n5) "{" DLATTN_TEXT_##count "}," \
               "{%" #n0 ",%" #n1 ",%" #n2 ",%" #n3 "},%" #n4 ",p,1,1,%" #n6 ";}" \
               : DLATTN_OPERANDS_##count \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(transposed))

#define DLATTN_WGMMA_SHAPE(columns, n0, n1, n2, n3, n4, n5, n6) \
  template <> \
  struct WgmmaShape<columns> { \
    template <class T, int transposed = 0> \
    static DLATTN_DEVICE void shared_shared(float (&d)[n0], uint64 a, uint64 b, int accumulate) { \
      if constexpr (same_type<T, bf16>) { \
        DLATTN_SHARED_SHARED(columns, n0, "bf16", n0, n1, n2, n3); \
      } else { \
        DLATTN_SHARED_SHARED(columns, n0, "f16", n0, n1, n2, n3); \
      } \
    } \
    template <class T, int transposed> \
    static DLATTN_DEVICE void register_shared(float (&d)[n0], const uint32 (&a)[4], uint64 b, \
                                              int accumulate) { \
      if constexpr (same_type<T, bf16>) { \
        DLATTN_REGISTER_SHARED(columns, n0, "bf16", n0, n1, n2, n3, n4, n5, n6); \
      } else { \
        DLATTN_REGISTER_SHARED(columns, n0, "f16", n0, n1, n2, n3, n4, n5, n6); \
      } \
    } \
  };

DLATTN_WGMMA_SHAPE(32, 16, 17, 18, 19, 20, 21, 22)
DLATTN_WGMMA_SHAPE(48, 24, 25, 26, 27, 28, 29, 30)
DLATTN_WGMMA_SHAPE(64, 32, 33, 34, 35, 36, 37, 38)
DLATTN_WGMMA_SHAPE(96, 48, 49, 50, 51, 52, 53, 54)
DLATTN_WGMMA_SHAPE(112, 56, 57, 58, 59, 60, 61, 62)
DLATTN_WGMMA_SHAPE(128, 64, 65, 66, 67, 68, 69, 70)
DLATTN_WGMMA_SHAPE(160, 80, 81, 82, 83, 84, 85, 86)
DLATTN_WGMMA_SHAPE(192, 96, 97, 98, 99, 100, 101, 102)
DLATTN_WGMMA_SHAPE(256, 128, 129, 130, 131, 132, 133, 134)

// clang-format on

}  // namespace dlattn
