package user_test

import (
	"testing"

	"example.com/module/helper"
)

func TestBoot(t *testing.T) { helper.Boot(t) }

func TestParse(t *testing.T) { helper.Parse() }
