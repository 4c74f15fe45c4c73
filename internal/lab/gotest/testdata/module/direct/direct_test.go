package direct

import (
	"testing"

	kit "example.com/module/helper"
)

func TestMain(m *testing.M) { kit.RequireKVM(nil) }

func TestDirect(t *testing.T) { kit.RequireKVM(t) }

func TestPlain(t *testing.T) { kit.Parse() }

type machine struct{}

func (machine) start(t *testing.T) { kit.RequireKVM(t) }

func TestMethod(t *testing.T) { machine{}.start(t) }

var cases = []func(*testing.T){TestDirect}

func TestTable(t *testing.T) { cases[0](t) }

func BenchmarkDirect(b *testing.B) { kit.RequireKVM(nil) }

func Testify() { kit.RequireKVM(nil) } // no test, by its name
