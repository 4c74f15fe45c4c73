// Command gen writes the Go form of the kernel's KVM interface.
//
// It compiles a small C file against the installed kernel headers
// (linux-libc-dev) and reads the answer back from the object file: structure
// layouts from its DWARF section, numbers from its data. Nothing is typed by
// hand and the package that results needs neither cgo nor a C compiler.
//
//	go run ./internal/gen -o zabi_amd64.go
package main

import (
	"flag"
	"fmt"
	"os"
)

func main() {
	out := flag.String("o", "zabi_amd64.go", "file to write")
	cc := flag.String("cc", "cc", "C compiler")
	flag.Parse()
	if err := run(*cc, *out); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

func run(cc, out string) error {
	macros, err := macroNames(cc)
	if err != nil {
		return err
	}
	consts := selectConstants(macros)
	obj, err := compile(cc, consts)
	if err != nil {
		return err
	}
	defer obj.Close()

	if err = readValues(obj, consts); err != nil {
		return err
	}
	structs, err := readStructs(obj)
	if err != nil {
		return err
	}
	code, err := emit(consts, structs)
	if err != nil {
		return err
	}
	return os.WriteFile(out, code, 0o644)
}
