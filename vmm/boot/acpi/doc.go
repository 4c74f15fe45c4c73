// Package acpi builds the ACPI tables of the machine: hardware-reduced ACPI 6
// (no fixed hardware, no legacy interrupt controller or timer), as a guest
// kernel needs it to find the processors, the I/O APIC and the devices that
// no bus announces.
//
//	RSDP -> XSDT -> FADT -> DSDT
//	             -> MADT
//
// The DSDT's byte code (AML) is put together by the small builder in aml.go.
// The package knows addresses and numbers only; it touches no guest memory.
// Section numbers in comments are those of the ACPI specification 6.5.
package acpi
