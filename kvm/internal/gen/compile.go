package main

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
)

// A constant is one macro of the headers and the Go constant made of it.
type constant struct {
	c     string
	name  string
	value uint64
	def   *constDef
}

// macroNames lists every object-like macro the headers define.
func macroNames(cc string) ([]string, error) {
	cmd := exec.Command(cc, "-E", "-dM", "-x", "c", "-")
	cmd.Stdin = strings.NewReader(includes())
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list macros: %w", err)
	}
	var names []string
	for _, line := range strings.Split(string(out), "\n") {
		f := strings.Fields(line)
		if len(f) >= 3 && f[0] == "#define" && !strings.Contains(f[1], "(") {
			names = append(names, f[1])
		}
	}
	sort.Strings(names)
	return names, nil
}

func includes() string {
	var b strings.Builder
	for _, h := range headers {
		fmt.Fprintf(&b, "#include <%s>\n", h)
	}
	b.WriteString(newer)
	return b.String()
}

// selectConstants applies constDefs to the macros of the headers.
func selectConstants(macros []string) []*constant {
	var list []*constant
	for i := range constDefs {
		d := &constDefs[i]
		for _, m := range macros {
			if !d.match.MatchString(m) || d.except != nil && d.except.MatchString(m) {
				continue
			}
			list = append(list, &constant{c: m, name: goName(d.prefix, strings.TrimPrefix(m, d.strip)), def: d})
		}
	}
	return list
}

// compile builds an object file that holds one variable per wanted structure
// and one array with the values of all constants.
func compile(cc string, consts []*constant) (*elf.File, error) {
	var src bytes.Buffer
	src.WriteString(includes())
	for _, s := range structDefs {
		fmt.Fprintf(&src, "%s want_%s;\n", s.expr, s.name)
	}
	src.WriteString("const unsigned long long values[] = {\n")
	for _, c := range consts {
		fmt.Fprintf(&src, "\t(unsigned long long)(%s),\n", c.c)
	}
	src.WriteString("};\n")

	dir, err := os.MkdirTemp("", "kvmgen")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	object := filepath.Join(dir, "abi.o")
	cmd := exec.Command(cc, "-gdwarf-4", "-O0", "-c", "-x", "c", "-o", object, "-")
	cmd.Stdin, cmd.Stderr = &src, os.Stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("compile headers: %w", err)
	}
	data, err := os.ReadFile(object)
	if err != nil {
		return nil, err
	}
	return elf.NewFile(bytes.NewReader(data))
}

// readValues fills in the numbers from the array the compiler evaluated.
func readValues(f *elf.File, consts []*constant) error {
	syms, err := f.Symbols()
	if err != nil {
		return fmt.Errorf("read symbols: %w", err)
	}
	for _, s := range syms {
		if s.Name != "values" {
			continue
		}
		data, err := f.Sections[s.Section].Data()
		if err != nil {
			return fmt.Errorf("read values: %w", err)
		}
		data = data[s.Value : s.Value+s.Size]
		for i, c := range consts {
			c.value = binary.LittleEndian.Uint64(data[8*i:])
		}
		return nil
	}
	return fmt.Errorf("read values: no such symbol")
}
