"""Rows of Parquet and CSV files, read by pyarrow in parts: a file need not fit into memory. Any of them may be packed
(.gz, .zst)."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from headstart.data.records.messages import quote
from headstart.data.sources.rejects import Bad, stop
from headstart.heads.errors import DataError
from headstart.heads.files import explain_read, open_regular

#: rows of a Parquet file that are made Python objects at once
BATCH = 64
#: bytes of a CSV file that are parsed at once. No row may be longer; pyarrow holds up to 32 of these blocks
CSV_BLOCK = 1 << 22
GZIP, ZSTD = (".gz",), (".zst", ".zstd")
PACKED = (*GZIP, *ZSTD)
#: what reading broken packed data raises
UNPACKING = (EOFError, OSError, zlib.error)
#: separator of a table as text, by suffix
SEPARATORS = {".csv": ",", ".tsv": "\t"}


@contextmanager
def open_unpacked(path: Path) -> Iterator[IO[bytes]]:
    """The file's content, unpacked where its name ends with .gz or .zst.

    Raises: OSError as `open_regular` does; while reading, EOFError, OSError or zlib.error for broken packed data.
    """
    with open_regular(path) as file:
        if path.suffix in GZIP:
            yield gzip.GzipFile(fileobj=file)  # type: ignore[misc]
        elif path.suffix in ZSTD:
            import pyarrow

            stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")
            yield io.BufferedReader(stream)
        else:
            yield file


def broken_data(path: Path, where: str, error: BaseException) -> BaseException:
    """What to raise where reading packed data failed: a DataError, or the error itself where the system refused."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    packing = "zstd" if path.suffix in ZSTD else "gzip"
    return DataError(f"{where}: broken {packing} data ({_short(error)}): copy the file again")


def kind_of_file(path: Path) -> str:
    """The suffix that says how to read a file, without that of packing: `.csv` for a.csv.gz."""
    return Path(path.stem).suffix.lower() if path.suffix in PACKED else path.suffix.lower()


def read_parquet(path: Path, bad: Bad = stop) -> Iterator[tuple[int, Any]]:
    """`(row from 1, record)`. Fields without a value are left out: a table has all columns in all rows.

    Raises: DataError naming the file, if it is no Parquet file; whatever `bad` raises for a row.
    """
    import pyarrow
    from pyarrow import parquet

    if path.suffix in PACKED:
        raise DataError(f"{path}: found a packed Parquet file, expected .parquet, which is packed in itself: unpack it")
    number = 0
    with explain_read(path), open_regular(path) as file:
        try:
            for batch in parquet.ParquetFile(file).iter_batches(BATCH, use_threads=False):
                for index in range(batch.num_rows):
                    number += 1
                    where = f"{path}: record {number}"
                    try:
                        (row,) = batch.slice(index, 1).to_pylist()
                    except (ValueError, OverflowError) as error:  # text that is not UTF-8, dates beyond Python's
                        bad(DataError(f"{where}: cannot be read ({error})"), where, number)
                        continue
                    yield number, plain(row)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: not readable as Parquet ({error}): copy or write the file again") from error


def plain(value: Any) -> Any:
    """A row of a table as JSON has it: fields without a value left out, bytes and dates as text."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return f"({len(value)} bytes)"
    return value if value is None or isinstance(value, str | int | float) else str(value)


def read_csv(path: Path, bad: Bad = stop) -> Iterator[tuple[int, Any]]:
    """`(row from 1, record)` of a CSV or TSV file whose first row names the columns. Every cell is text; empty ones are
    left out.

    Raises: DataError naming the file; whatever `bad` raises for a row with too many or too few cells, or that is not
        UTF-8.
    """
    import pyarrow

    with explain_read(path):
        try:
            yield from _csv_rows(path, bad)
        except pyarrow.ArrowInvalid as error:
            if "straddl" in str(error):
                found = f"found a row of more than {CSV_BLOCK} bytes, or quotes that do not end"
                raise DataError(f"{path}: {found}: write such rows to a .jsonl or .parquet file") from error
            if "Empty CSV file" not in str(error):
                remedy = ": save the file as UTF-8" if "\ufffd" in str(error) else ": write the file again, quoted"
                raise DataError(f"{path}: not readable as CSV ({_short(error)}){remedy}") from error
        except UNPACKING as error:
            raise broken_data(path, str(path), error) from error


def _csv_rows(path: Path, bad: Bad) -> Iterator[tuple[int, Any]]:
    import pyarrow
    from pyarrow import csv

    broken: list[Any] = []

    def note(row: Any) -> str:
        broken.append(row)
        return "skip"

    separator = _separator(path)
    reading = csv.ReadOptions(use_threads=False, block_size=CSV_BLOCK)
    parsing = csv.ParseOptions(delimiter=separator, newlines_in_values=True, invalid_row_handler=note)
    names = _column_names(path, reading, separator)
    # as bytes: text that is not UTF-8 then spoils its row, not the file
    converting = csv.ConvertOptions(column_types={name: pyarrow.binary() for name in names}, strings_can_be_null=False)
    number, skipped = 0, set[int]()

    def tell() -> None:
        for row in broken:
            skipped.add(row.number - 1)  # the names are row 1 to pyarrow, which reads a block ahead
            where = f"{path}: record {row.number - 1}"
            found = f"found {row.actual_columns} cells, expected {row.expected_columns}"
            remedy = f'quote cells that hold {quote(separator)}, " or a line break'
            bad(DataError(f"{where}: {found}: {remedy}"), where, row.number - 1)
        broken.clear()

    with open_unpacked(path) as file, csv.open_csv(file, reading, parsing, converting) as reader:
        for batch in reader:
            tell()
            for start in range(0, batch.num_rows, BATCH):
                for cells in batch.slice(start, BATCH).to_pylist():
                    number += 1
                    while number in skipped:
                        skipped.remove(number)
                        number += 1
                    where = f"{path}: record {number}"
                    try:
                        record = {name: cell.decode() for name, cell in cells.items() if cell}
                    except UnicodeDecodeError as error:
                        found = f"not UTF-8 text ({error.reason} at byte {error.start}): save the file as UTF-8"
                        bad(DataError(f"{where}: {found}"), where, number)
                        continue
                    yield number, record
        tell()  # rows behind the last good one


def _separator(path: Path) -> str:
    """That of the file's kind; a semicolon where the row of names holds one and no comma, as spreadsheets write it in
    countries with a decimal comma. Raises DataError for UTF-16, whose rows cannot be told apart."""
    with open_unpacked(path) as file:
        names = file.readline(CSV_BLOCK)
    if names.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{path}: found UTF-16 text, expected UTF-8: save the file as UTF-8")
    usual = SEPARATORS[kind_of_file(path)]
    return ";" if usual == "," and b";" in names and b"," not in names else usual


def _column_names(path: Path, reading: Any, separator: str) -> list[str]:
    from pyarrow import csv

    quiet = csv.ParseOptions(delimiter=separator, newlines_in_values=True, invalid_row_handler=lambda row: "skip")
    with open_unpacked(path) as file, csv.open_csv(file, reading, quiet) as reader:
        try:
            names = list(reader.schema.names)
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: the names of the columns are not UTF-8 text: save the file as UTF-8") from error
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path}: found two columns {quote(twice)}, expected different names in the first row")
    return names


def _short(error: BaseException) -> str:
    return str(error)[:200]
