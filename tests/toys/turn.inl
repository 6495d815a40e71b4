// Pairs of columns, turned by angles.

namespace normops::cpu::NORMOPS_ISA {
namespace {

// Turned back if kBack.
template <bool kBack, class R>
NORMOPS_INLINE void turn(Block<R>& first, Block<R>& second, const Block<R>& cos, const Block<R>& sin) {
  const Block<R> minus = broadcast<R>(-1), sine = kBack ? sin * minus : sin;
  const Block<R> turned = fma(first, cos, second * sine * minus);
  second = fma(second, cos, first * sine);
  first = turned;
}

}  // namespace
}  // namespace normops::cpu::NORMOPS_ISA
