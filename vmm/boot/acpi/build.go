package acpi

import "fmt"

// Tables is an image of all tables, to be put at Address in guest memory. It
// holds absolute addresses and works nowhere else.
type Tables struct {
	Address uint64 // guest-physical
	Image   []byte
	RSDP    uint64 // guest-physical address of the root pointer
}

// Build makes the tables for a configuration, for TablesAddress. The error is a
// *ConfigError.
func Build(c Config) (Tables, error) {
	if err := c.validate(); err != nil {
		return Tables{}, err
	}
	image := layout{next: TablesAddress}
	// The root pointer comes first in memory but is known last.
	rsdp := image.add(make([]byte, rsdpSize))
	dsdt := image.add(differentiatedTable(c))
	fadt := image.add(fixedTable(dsdt, c.Power))
	madt := image.add(interruptTable(c.CPUs))
	xsdt := image.add(rootTable(fadt, madt))
	copy(image.bytes, rootPointer(xsdt))
	if size := len(image.bytes); size > TablesEnd-TablesAddress {
		return Tables{}, &ConfigError{fmt.Sprintf("%d bytes of tables, there is room for %d", size, TablesEnd-TablesAddress)}
	}
	return Tables{Address: TablesAddress, Image: image.bytes, RSDP: rsdp}, nil
}

// layout lays tables one behind the other.
type layout struct {
	next  uint64
	bytes []byte
}

// add returns the address that the table gets. Tables start at multiples of 16,
// as the root pointer must.
func (l *layout) add(t []byte) (address uint64) {
	address = l.next
	padded := (len(t) + 15) &^ 15
	l.bytes = append(append(l.bytes, t...), make([]byte, padded-len(t))...)
	l.next += uint64(padded)
	return address
}
