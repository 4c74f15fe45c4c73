package sample

import "testing"

func FuzzReal(f *testing.F) {}

func FuzzHelper(t *testing.T) {}

func FuzzTwo(a, b *testing.F) {}

type suite struct{}

func (suite) FuzzMethod(f *testing.F) {}

func TestPlain(t *testing.T) {}
