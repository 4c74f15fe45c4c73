package output

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"text/template"
)

// Format is the value of -o.
type Format string

const (
	Table Format = "table"
	JSON  Format = "json"  // one document
	JSONL Format = "jsonl" // one object a line
	Name  Format = "name"  // one name a line
)

// Set is for package pflag.
func (f *Format) Set(s string) error {
	switch v := Format(s); v {
	case Table, JSON, JSONL, Name:
		*f = v
		return nil
	}
	return fmt.Errorf("%q is none of table, json, jsonl, name", s)
}

func (f *Format) String() string { return string(*f) }

// Type is for package pflag.
func (f *Format) Type() string { return "table|json|jsonl|name" }

// Machine reports whether a program reads the output.
func (f Format) Machine() bool { return f == JSON || f == JSONL }

// List is a result of several items of one kind.
type List[T any] struct {
	// Header and Row are the table's. A row has as many cells as the header.
	Header []string
	Row    func(T) []string
	// Name is for the format of that name.
	Name  func(T) string
	Items []T
}

// Write prints the list.
func (l List[T]) Write(w io.Writer, f Format) error {
	switch f {
	case JSON:
		items := l.Items
		if items == nil {
			items = []T{} // an empty array, not null
		}
		return WriteJSON(w, items)
	case JSONL:
		return each(l.Items, func(item T) error { return writeLine(w, item) })
	case Name:
		return each(l.Items, func(item T) error {
			_, err := fmt.Fprintln(w, l.Name(item))
			return err
		})
	}
	return l.writeTable(w)
}

// WriteTemplate prints each item through a Go template, one a line. Beside the
// functions of text/template there is json.
func (l List[T]) WriteTemplate(w io.Writer, text string) error {
	t, err := ParseTemplate(text)
	if err != nil {
		return err
	}
	return each(l.Items, func(item T) error {
		var b strings.Builder
		if err := t.Execute(&b, item); err != nil {
			return fmt.Errorf("format: %w", err)
		}
		_, err := fmt.Fprintln(w, b.String())
		return err
	})
}

func (l List[T]) writeTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(t, strings.Join(l.Header, "\t"))
	for _, item := range l.Items {
		cells := l.Row(item)
		for i, c := range cells {
			if cells[i] = Visible(c); c == "" {
				cells[i] = "-"
			}
		}
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	return t.Flush()
}

func each[T any](items []T, do func(T) error) error {
	for _, item := range items {
		if err := do(item); err != nil {
			return err
		}
	}
	return nil
}

// ParseTemplate reads the value of --format.
func ParseTemplate(text string) (*template.Template, error) {
	t, err := template.New("format").Funcs(template.FuncMap{
		"json": func(v any) (string, error) {
			b, err := encode(v, "")
			return strings.TrimSuffix(string(b), "\n"), err
		},
		"join":  strings.Join,
		"lower": strings.ToLower,
		"upper": strings.ToUpper,
		"size":  func(v any) string { return sizeOf(v) },
	}).Parse(text)
	if err != nil {
		return nil, fmt.Errorf("format: %w", err)
	}
	return t, nil
}

func sizeOf(v any) string {
	switch n := v.(type) {
	case int64:
		return Size(n)
	case uint64:
		return Size(int64(n))
	case int:
		return Size(int64(n))
	}
	return fmt.Sprint(v)
}

// WriteJSON prints a document for people and programs: indented, with < and >
// as they are.
func WriteJSON(w io.Writer, v any) error {
	b, err := encode(v, "  ")
	if err != nil {
		return err
	}
	_, err = w.Write(b)
	return err
}

func writeLine(w io.Writer, v any) error {
	b, err := encode(v, "")
	if err != nil {
		return err
	}
	_, err = w.Write(b)
	return err
}

// WriteObject prints one object in the format that was asked for: a line for
// JSONL, a document otherwise.
func WriteObject(w io.Writer, f Format, v any) error {
	if f == JSONL {
		return writeLine(w, v)
	}
	return WriteJSON(w, v)
}

func encode(v any, indent string) ([]byte, error) {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", indent)
	if err := e.Encode(v); err != nil {
		return nil, fmt.Errorf("encode output: %w", err)
	}
	return []byte(b.String()), nil
}
