"""Small matrices over a field of scalars. Shapes: `rows` holds R tuples of C scalars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .result import TooBig, Undefined

if TYPE_CHECKING:
    from .evaluate import Field

_MAX_DETERMINANT_SIZE = 6


@dataclass(frozen=True)
class Matrix:
    """An R x C matrix."""

    rows: tuple[tuple[Any, ...], ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(R, C)."""
        return len(self.rows), len(self.rows[0])


def add(field: Field, left: Any, right: Any) -> Matrix:
    """left + right. Raises Undefined if the shapes differ or one is a number."""
    if not (isinstance(left, Matrix) and isinstance(right, Matrix) and left.shape == right.shape):
        raise Undefined("a sum of different shapes")
    return Matrix(
        tuple(
            tuple(field.add(a, b) for a, b in zip(*rows, strict=True))
            for rows in zip(left.rows, right.rows, strict=True)
        )
    )


def multiply(field: Field, left: Any, right: Any) -> Any:
    """left times right; one of them may be a scalar."""
    if not isinstance(left, Matrix):
        left, right = right, left  # scalars commute with matrices
        return Matrix(
            tuple(tuple(field.multiply(right, cell) for cell in row) for row in left.rows)
        )
    if not isinstance(right, Matrix):
        return Matrix(
            tuple(tuple(field.multiply(right, cell) for cell in row) for row in left.rows)
        )
    if left.shape[1] != right.shape[0]:
        raise Undefined("a product of shapes that do not fit")
    columns = transpose(right).rows
    return Matrix(tuple(tuple(_dot(field, row, column) for column in columns) for row in left.rows))


def transpose(matrix: Matrix) -> Matrix:
    """The C x R transpose."""
    return Matrix(tuple(zip(*matrix.rows, strict=True)))


def trace(field: Field, matrix: Matrix) -> Any:
    """The sum of the diagonal."""
    _square_size(matrix)
    total = field.integer(0)
    for place, row in enumerate(matrix.rows):
        total = field.add(total, row[place])
    return total


def determinant(field: Field, matrix: Matrix) -> Any:
    """Laplace expansion along the first row; at most 6 x 6."""
    size = _square_size(matrix)
    if size == 1:
        return matrix.rows[0][0]
    total = field.integer(0)
    for column, cell in enumerate(matrix.rows[0]):
        term = field.multiply(cell, determinant(field, _minor(matrix, 0, column)))
        total = field.add(total, field.negate(term) if column % 2 else term)
    return total


def inverse(field: Field, matrix: Matrix) -> Matrix:
    """The adjugate over the determinant. Raises Undefined for a singular matrix."""
    size = _square_size(matrix)
    scale = field.invert(determinant(field, matrix))
    if size == 1:
        return Matrix(((scale,),))
    cofactors = tuple(
        tuple(
            _signed(field, (row + column) % 2, determinant(field, _minor(matrix, column, row)))
            for column in range(size)
        )
        for row in range(size)
    )
    return multiply(field, scale, Matrix(cofactors))  # type: ignore[no-any-return]


def power(field: Field, matrix: Matrix, exponent: int) -> Matrix:
    """An integer power by repeated squaring."""
    size = _square_size(matrix)
    if abs(exponent) > 10_000:
        raise TooBig("a high power of a matrix")
    if exponent < 0:
        return power(field, inverse(field, matrix), -exponent)
    one, zero = field.integer(1), field.integer(0)
    result = Matrix(tuple(tuple(one if r == c else zero for c in range(size)) for r in range(size)))
    while exponent:
        if exponent & 1:
            result = multiply(field, result, matrix)
        matrix = multiply(field, matrix, matrix) if exponent > 1 else matrix
        exponent >>= 1
    return result


def _signed(field: Field, is_negative: int, value: Any) -> Any:
    return field.negate(value) if is_negative else value


def _dot(field: Field, row: tuple[Any, ...], column: tuple[Any, ...]) -> Any:
    total = field.integer(0)
    for a, b in zip(row, column, strict=True):
        total = field.add(total, field.multiply(a, b))
    return total


def _minor(matrix: Matrix, row: int, column: int) -> Matrix:
    return Matrix(
        tuple(r[:column] + r[column + 1 :] for i, r in enumerate(matrix.rows) if i != row)
    )


def _square_size(matrix: Matrix) -> int:
    rows, columns = matrix.shape
    if rows != columns:
        raise Undefined("a square matrix is needed")
    if rows > _MAX_DETERMINANT_SIZE:
        raise TooBig(f"a matrix larger than {_MAX_DETERMINANT_SIZE} x {_MAX_DETERMINANT_SIZE}")
    return rows
