// Package source knows what a program for the kernel is compiled from.
package source

import (
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
)

var included = regexp.MustCompile(`(?m)^#include "(.+)"$`)

// Hash is that of a program's source and of the headers beside it that it includes, each of which includes none.
func Hash(path string) (string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	sum.Write(text)
	for _, found := range included.FindAllSubmatch(text, -1) {
		header, err := os.ReadFile(filepath.Join(filepath.Dir(path), string(found[1])))
		if err != nil {
			return "", err
		}
		sum.Write(header)
	}
	return fmt.Sprintf("%x", sum.Sum(nil)), nil
}

// Check says whether an object, and what a package knows of it, are of a source.
func Check(path string, object []byte, known string) error {
	want, err := Hash(path)
	if err != nil {
		return err
	}
	if known != want {
		return fmt.Errorf("zsource.go is of a source %s, %s is %s: make bpf", known, path, want)
	}
	f, err := elf.NewFile(bytes.NewReader(object))
	if err != nil {
		return err
	}
	section := f.Section("forkvm.source")
	if section == nil {
		return fmt.Errorf("the object of %s does not say what it was compiled from", path)
	}
	content, err := io.ReadAll(section.Open())
	if err != nil || string(bytes.TrimRight(content, "\x00")) != want {
		return fmt.Errorf("the object was compiled from a source %q (%v), %s is %s: make bpf", content, err, path, want)
	}
	return nil
}
