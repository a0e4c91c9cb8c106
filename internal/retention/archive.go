package retention

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"tidings/store"
)

// Archive is a file with the rows of one day of a history table: gzip, one JSON object a line, its keys the columns. Its name says
// what it holds: t_msg_record.20260901.2000000.ndjson.gz.
type Archive struct {
	Path  string
	Table string
	Day   string // 20260901
	Rows  int64
	Bytes int64 // of the file
}

var fileName = regexp.MustCompile(`^(t_msg_record|t_msg_attempt)\.(\d{8})\.(\d+)\.ndjson\.gz$`)

const timeForm = "2006-01-02 15:04:05.000"

// jsonColumns hold JSON. Objects and arrays are written as they are; what else a hand may have put there, null above all, as a string.
var jsonColumns = []string{"params", "content"}

// List tells which archives a directory has, by day.
func List(dir string) (archives []Archive, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		a, ok := parse(filepath.Join(dir, e.Name()))
		if !ok {
			continue
		}
		info, err := e.Info()
		if err != nil {
			return nil, err
		}
		a.Bytes = info.Size()
		archives = append(archives, a)
	}
	slices.SortFunc(archives, func(a, b Archive) int { return cmp.Or(cmp.Compare(a.Day, b.Day), cmp.Compare(a.Table, b.Table)) })
	return archives, nil
}

func parse(path string) (a Archive, ok bool) {
	m := fileName.FindStringSubmatch(filepath.Base(path))
	if m == nil {
		return a, false
	}
	rows, err := strconv.ParseInt(m[3], 10, 64)
	return Archive{Path: path, Table: m[1], Day: m[2], Rows: rows}, err == nil
}

// write archives a day, and proves that the file has as many rows as the day. What a crash leaves has another name, and goes with the next try.
func write(ctx context.Context, st *store.Store, dir, table, partition string) (a Archive, err error) {
	day := strings.TrimPrefix(partition, "p")
	parts := "." + table + "." + day + ".*.part"
	left, err := filepath.Glob(filepath.Join(dir, parts))
	if err != nil {
		return a, err
	}
	for _, path := range left {
		if err := os.Remove(path); err != nil {
			return a, err
		}
	}
	f, err := os.CreateTemp(dir, parts)
	if err != nil {
		return a, err
	}
	defer func() {
		f.Close()
		os.Remove(f.Name()) // its name has changed if all went well
	}()
	zip := gzip.NewWriter(f)
	out := bufio.NewWriterSize(zip, 1<<16)
	err = st.EachOfDay(ctx, table, partition, func(columns []string, values []any) error {
		a.Rows++
		return writeRow(out, columns, values)
	})
	if err := errors.Join(err, out.Flush(), zip.Close(), f.Sync()); err != nil {
		return a, err
	}
	kept, err := countRows(ctx, f.Name())
	if err != nil {
		return a, fmt.Errorf("read back %s: %w", f.Name(), err)
	}
	there, err := st.CountDay(ctx, table, partition)
	if err != nil {
		return a, err
	}
	if kept != a.Rows || kept != there {
		return a, fmt.Errorf("the archive of %s of %s has %d rows, and the table %d", partition, table, kept, there)
	}
	path := filepath.Join(dir, fmt.Sprintf("%s.%s.%d.ndjson.gz", table, day, kept))
	if _, err := os.Stat(path); err == nil { // archived before, and not dropped; or another database's
		if err := sameLines(ctx, f.Name(), path); err != nil {
			return a, fmt.Errorf("%s is there already, and is not an archive of these rows (%w): does another database use archive_dir?", path, err)
		}
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return a, err
	}
	d, err := os.Open(dir)
	if err != nil {
		return a, err
	}
	defer d.Close()
	a.Path, a.Table, a.Day = path, table, day
	return a, d.Sync()
}

func writeRow(out *bufio.Writer, columns []string, values []any) error {
	var line bytes.Buffer
	line.WriteByte('{')
	for i, name := range columns {
		if i > 0 {
			line.WriteByte(',')
		}
		fmt.Fprintf(&line, "%q:", name)
		if err := writeValue(&line, name, values[i]); err != nil {
			return err
		}
	}
	line.WriteString("}\n")
	_, err := out.Write(line.Bytes())
	return err
}

func writeValue(line *bytes.Buffer, name string, value any) error {
	if text, ok := value.(string); ok && slices.Contains(jsonColumns, name) && plain(text) {
		line.WriteString(text)
		return nil
	}
	if at, ok := value.(time.Time); ok {
		value = at.UTC().Format(timeForm)
	}
	if name == "msg_id" { // as everywhere in JSON: many readers of it know numbers up to 2^53 only
		value = fmt.Sprint(value)
	}
	text, err := json.Marshal(value)
	line.Write(text)
	return err
}

// plain tells whether a column's JSON may stand in a line as it is. Servers take some that is none to others, and line breaks.
func plain(text string) bool {
	return (strings.HasPrefix(text, "{") || strings.HasPrefix(text, "[")) && !strings.ContainsAny(text, "\r\n") && json.Valid([]byte(text))
}

// countRows reads a whole archive as Restore does: each line must be a row, and gzip's checksum is at its end.
func countRows(ctx context.Context, path string) (n int64, err error) {
	err = eachLine(ctx, path, func(line []byte) error {
		n++
		_, _, err := readRow(line)
		return err
	})
	return n, err
}

// sameLines tells whether two archives have the same rows.
func sameLines(ctx context.Context, a, b string) error {
	var sums [2][sha256.Size]byte
	for i, path := range []string{a, b} {
		h := sha256.New()
		if err := eachLine(ctx, path, func(line []byte) error { h.Write(line); return nil }); err != nil { // a hash takes all it is given
			return err
		}
		h.Sum(sums[i][:0])
	}
	if sums[0] != sums[1] {
		return errors.New("other rows")
	}
	return nil
}

// eachLine reads an archive line by line, however long they are, until ctx ends.
func eachLine(ctx context.Context, path string, each func([]byte) error) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	zip, err := gzip.NewReader(bufio.NewReaderSize(f, 1<<16))
	if err != nil {
		return err
	}
	for lines := bufio.NewReaderSize(zip, 1<<16); ctx.Err() == nil; {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			if err := each(line); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return ctx.Err()
}

// Limits of a statement that brings rows back.
const (
	restoreRows  = 500
	restoreBytes = 1 << 20
)

// Restore brings an archive back into a table of its own, which it makes: into the history it would be dropped with the next old day.
// An empty name means the table's with the day, such as t_msg_record_20260901. It tells the name, and how many rows there are.
func Restore(ctx context.Context, st *store.Store, path, table string) (_ string, rows int64, err error) {
	a, ok := parse(path)
	if !ok {
		return "", 0, fmt.Errorf("%s is no archive: they are called t_msg_record.<day>.<rows>.ndjson.gz", path)
	}
	lines, err := countRows(ctx, path) // before anything is made
	if err != nil {
		return "", 0, fmt.Errorf("read %s: %w", path, err)
	}
	if lines != a.Rows {
		return "", 0, fmt.Errorf("%s has %d rows where its name says %d: it is damaged", path, lines, a.Rows)
	}
	if table == "" {
		table = a.Table + "_" + a.Day
	}
	if err := st.MakeRestoreTable(ctx, table, a.Table); err != nil {
		return table, 0, err
	}
	var (
		columns []string
		batch   [][]any
		size    int
	)
	flush := func() error {
		if len(batch) == 0 {
			return nil
		}
		err := st.InsertRestored(ctx, table, columns, batch)
		batch, size = batch[:0], 0
		return err
	}
	err = eachLine(ctx, path, func(line []byte) error {
		names, values, err := readRow(line)
		if err != nil {
			return err
		}
		if !slices.Equal(names, columns) {
			if err := flush(); err != nil {
				return err
			}
			columns = names
		}
		batch = append(batch, values)
		if size += len(line); len(batch) == restoreRows || size > restoreBytes {
			return flush()
		}
		return nil
	})
	if err := errors.Join(err, flush()); err != nil {
		return table, 0, err
	}
	rows, err = st.CountRestored(ctx, table)
	if err == nil && rows != a.Rows {
		err = fmt.Errorf("%s has %d rows, and the archive %d", table, rows, a.Rows)
	}
	return table, rows, err
}

// readRow reads a line with its columns in their order.
func readRow(line []byte) (columns []string, values []any, err error) {
	d := json.NewDecoder(bytes.NewReader(line))
	d.UseNumber()
	if _, err := d.Token(); err != nil {
		return nil, nil, err
	}
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return nil, nil, err
		}
		column, _ := name.(string)
		var value any
		if slices.Contains(jsonColumns, column) {
			var raw json.RawMessage
			if err := d.Decode(&raw); err != nil {
				return nil, nil, err
			}
			switch {
			case string(raw) == "null":
			case raw[0] == '"':
				var text string
				if err := json.Unmarshal(raw, &text); err != nil {
					return nil, nil, err
				}
				value = text
			default:
				value = string(raw)
			}
		} else if err := d.Decode(&value); err != nil {
			return nil, nil, err
		}
		if n, ok := value.(json.Number); ok {
			value = n.String()
		}
		columns, values = append(columns, column), append(values, value)
	}
	if _, err := d.Token(); err != nil && !errors.Is(err, io.EOF) {
		return nil, nil, err
	}
	return columns, values, nil
}
