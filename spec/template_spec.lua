-- Chat templates against what Jinja 3.1 prints with transformers' settings, and what is refused.
local helper = require("spec.helper")
local pyvalue = require("liger.data.pyvalue")
local template = require("liger.data.template")

local variables = {
  messages = { { r = "1" }, { r = "2" } },
  d = { a = { 1, 2.5 }, b = {} },
  s = " x ",
}

-- Each pair: a template and its text.
local printed = {
  expressions = {
    { [[{{ "a\x41\u00e9\\" }}{{ 'it\'s' }}{{ "a" "b" }}]], "aA\195\169\\it'sab" },
    { [[{{ '}}' ~ 1.5 ~ none ~ true }}]], "}}1.5NoneTrue" },
    {
      [[{{ x.y if x is defined else "u" }}{{ 1 if 0 else 2 if 0 else 3 }}{{ "no" if false }}]],
      "u3",
    },
    { [[{{ not x is defined and 1 < 2 <= 2 }}{{ not (1 == 1) or 2 != 3 }}]], "TrueTrue" },
    { [[{{ 5 // 2 ~ 7 / 2 }}{{ 10 % 3 }}{{ 2 ** 3 }}{{ -2 + 1 }}{{ -1|abs }}]], "23.518-11" },
    {
      [[{{ "x" in ["x"] and "q" not in {"a":1} }}{{ "a" in d }}{{ "b" in "abc" }}]],
      "TrueTrueTrue",
    },
    {
      [[{{ [1, 2] + [3] }}{{ [1] == [1] }}{{ {"a":1} == {"a":1} }}{{ "ab" * 2 }}]],
      "[1, 2, 3]TrueTrueabab",
    },
    {
      [[{{ [none, true, "it's", 'q"', "a\\b", "\n"] }}]],
      [=[[None, True, "it's", 'q"', 'a\\b', '\n']]=],
    },
    { [[{{ 1e-5 }}{{ 0.1 }}{{ 123456789.5 }}{{ {"a": 1.5} }}]], "1e-050.1123456789.5{'a': 1.5}" },
  },
  ["parts of values"] = {
    { [[{{ [1,2,3][::-1] }}{{ [1,2,3,4][1:3] }}{{ [1,2,3][-2:] }}]], "[3, 2, 1][2, 3][2, 3]" },
    {
      [[{{ "abc"[::-1] }}{% set x = "h]] .. "\195\169" .. [[llo" %}{{ x[1:3] }}{{ x|length }}]],
      "cba\195\169l5",
    },
    {
      [[{{ messages[-1]['r'] }}{{ messages[5] is defined }}]]
        .. [[{{ d.get("q", 5) }}{{ d.get("q") is none }}]],
      "2False5True",
    },
    {
      [[{{ d.a[1] }}{{ d["a"][0] }}{{ d.a.0 }}{{ messages.0.r }}{{ d.keys()|list }}]],
      "2.5111['a', 'b']",
    },
    {
      [[{{ d.items is defined }}{{ none.foo is defined }}{{ "s".foo is defined }}]],
      "TrueFalseFalse",
    },
  },
  ["methods of strings"] = {
    {
      [[{{ "a b c".split()[-1]|upper }}{{ "a,b,c".split(",",1) }}{{ "a-b-c".rsplit("-",1) }}]],
      "C['a', 'b,c']['a-b', 'c']",
    },
    {
      [[{{ "xxaxx".strip("x") }}{{ "xxaxx".lstrip("x") }}]]
        .. [[{{ "xxaxx".rstrip("x") }}{{ " a ".strip() }}]],
      "aaxxxxaa",
    },
    {
      [[{{ "x".startswith(("a","x")) }}{{ "abc".endswith("c") }}{{ "a\nb\n".splitlines() }}]],
      "TrueTrue['a', 'b']",
    },
    {
      [[{{ "aaa".replace("a","b",2) }}{{ "abcabc".find("c") }}{{ "hello there".title() }}]],
      "bba2Hello There",
    },
    {
      [[{{ "A".lower() + "b".capitalize() }}{{ "x".join(["a","b"]) }}{{ "12".isdigit() }}]],
      "aBaxbTrue",
    },
  },
  filters = {
    {
      [[{{ {"b":[1.5, none, "]] .. "\195\169" .. [["], "a":{}}|tojson }}]],
      '{"b": [1.5, null, "\195\169"], "a": {}}',
    },
    { [[{{ {"a": 1, "b": [2]}|tojson(indent=2) }}]], '{\n  "a": 1,\n  "b": [\n    2\n  ]\n}' },
    { [[{{ "\t\u001f<&'"|tojson }}]], [["\t\u001f<&'"]] },
    {
      [[{{ messages|map(attribute="r")|join("-") }}{{ ["a","b"]|map("upper")|list }}]],
      "1-2['A', 'B']",
    },
    {
      [[{{ messages|selectattr("r","equalto","2")|list }}]]
        .. [[{{ messages|rejectattr("zz")|list|length }}]],
      "[{'r': '2'}]2",
    },
    {
      [[{{ [0,1]|select|list }}{{ [1,2,3]|select("odd")|list }}{{ [1,2,3]|reject("odd")|list }}]],
      "[1][1, 3][2]",
    },
    { [[{{ zz|default("d") }}{{ ""|default("d", true) }}{{ ""|default("d") }}]], "dd" },
    {
      [[{{ [3,1,2]|sort }}{{ [1,1,2]|unique|list }}]]
        .. [[{{ "abc"|reverse }}{{ [1,2]|last }}{{ "abc"|first }}]],
      "[1, 2, 3][1, 2]cba2a",
    },
    {
      [[{{ "a\n b"|indent(2) }}|{{ "a,b"|replace(",", "\n")|indent(2, true) }}]],
      "a\n   b|  a\n  b",
    },
    {
      [[{{ "3"|int + 1 }}{{ 3.7|int }}{{ "x"|int }}]]
        .. [[{{ s|trim|length }}{{ [2,3]|sum }}{{ [3,1]|max }}]],
      "4301" .. "53",
    },
  },
  tests = {
    { [[{{ messages[0].r is string and messages is iterable and d is mapping }}]], "True" },
    {
      [[{{ [] is sequence }}{{ 1 is number }}{{ 1 is integer }}{{ 1.5 is float }}{{ 1 is true }}]],
      "TrueTrueTrueTrueFalse",
    },
    {
      [[{{ 1 is divisibleby 1 }}{{ 3 is odd }}{{ none is none }}]]
        .. [[{{ 3 is in [3] }}{{ x is not defined }}]],
      ("True"):rep(5),
    },
  },
  statements = {
    { "{% for i in [1,2,3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13" },
    {
      "{% for i in [1,2] %}{{ i }}{% break %}{% endfor %}"
        .. "{% for i in [] %}{% else %}none{% endfor %}",
      "1none",
    },
    {
      [[{% for k, v in {"a":1,"b":2}.items() if v > 1 %}]]
        .. [[{{ loop.index }}{{ k }}{{ loop.last }}{% endfor %}]],
      "1bTrue",
    },
    {
      "{% for a in [1,2,3] %}{{ loop.previtem is defined }}{{ loop.revindex }}{% endfor %}",
      "False3True2True1",
    },
    {
      "{% for a in [1,2] %}{% for b in [3,4] %}{{ loop.index }}{% endfor %}"
        .. "{{ loop.index0 }}{% endfor %}",
      "120121",
    },
    {
      "{% set ns = namespace(x=1) %}"
        .. "{% for i in [1,2] %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}",
      "4",
    },
    { [[{% set x = "a" %}{% for i in [1] %}{% set x = "b" %}{{ x }}{% endfor %}{{ x }}]], "ba" },
    {
      "{% set a, b = [1, 2] %}{{ a }}{{ b }}{% set x %}blo{{ 1 }}ck{% endset %}{{ x }}",
      "12blo1ck",
    },
    {
      [[{% macro m(a, b="B") %}[{{ a }}{{ b }}]{% endmacro %}{{ m(1) }}{{ m(2, b=3) }}]],
      "[1B][23]",
    },
    { "{% generation %}g{% endgeneration %}{% if x %}{% elif 1 %}e{% endif %}", "ge" },
  },
  ["white space"] = {
    { "  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb" },
    { "a  {%- if true %} b {% endif -%}  c\n\n", "a b c\n" },
    { "   {%+ if true %} b {% endif +%}\n  c", "    b \n  c" },
    { "x\n   {# c #}\n   {% set y = 1 %}   {% set z = 2 %}\n{{ y }}", "x\n   1" },
    { "  {{ 1 }}  \n  {{- 2 -}}  \n 3\n", "  123" },
    { "a\r\nb\n", "a\nb" },
  },
}

describe("template", function()
  for name, cases in pairs(printed) do
    it("prints " .. name .. " as Jinja does", function()
      for _, case in ipairs(cases) do
        assert.equal(case[2], template.compile(case[1]):render(variables), case[1])
      end
    end)
  end

  it("keeps the order of keys that a JSON text has", function()
    local value = pyvalue.decode('{"z": [1, {"y": null, "x": "\\u00e9"}], "a": {}, "l": []}')
    local text = template.compile("{{ v|tojson }}"):render({ v = value })
    assert.equal('{"z": [1, {"y": null, "x": "\195\169"}], "a": {}, "l": []}', text)
  end)

  it("gives plain tables the usual order of tool descriptions", function()
    local called = { parameters = {}, name = "f", description = "d" }
    local tool = { type = "function", ["function"] = called }
    local text = template.compile("{{ v|tojson }}"):render({ v = tool })
    local inner = '{"name": "f", "description": "d", "parameters": {}}'
    assert.equal('{"type": "function", "function": ' .. inner .. "}", text)
  end)

  local refused = {
    { "a\n{{ x y }}", "chat template, line 2: cannot be read at 'y }}'" },
    { "{% foo %}", "chat template, line 1: cannot be read at 'foo %}'" },
    { "{{ 'a }}", "chat template, line 1: cannot be read at ''a }}'" },
    { "\n{% if 1 %}", "chat template, line 2: 'if' has no end" },
    { "{% endif %}", "chat template, line 1: 'endif' stands alone" },
    { "\n\n{{ raise_exception('boo') }}", "chat template, line 3: boo" },
    { "{{ x.y }}", "chat template, line 1: 'x' is undefined" },
    { "{{ d.zz.q }}", "chat template, line 1: 'dict object' has no attribute 'zz'" },
    { "{{ 'a' + 1 }}", "chat template, line 1: cannot add string and number" },
    { "{{ 1 - 'a' }}", "chat template, line 1: cannot apply - to number and string" },
    { "{{ 1 // 0 }}", "chat template, line 1: division by zero" },
    { "{{ 1 < 'a' }}", "chat template, line 1: cannot compare number < string" },
    { "{{ -'a' }}", "chat template, line 1: bad operand type for unary -: string" },
    { "{{ 1[0:1] }}", "chat template, line 1: a number cannot be sliced" },
    { "{{ [1][::0] }}", "chat template, line 1: slice step cannot be zero" },
    { "{{ 'a'() }}", "chat template, line 1: 'string' object is not callable" },
    { "{{ f() }}", "chat template, line 1: 'f' is undefined" },
    { "{{ 1|nofilter }}", "chat template, line 1: No filter named 'nofilter'." },
    { "{{ 1 is notest }}", "chat template, line 1: No test named 'notest'." },
    { "{{ 1|length }}", "chat template, line 1: object of type 'int' has no len()" },
    { "{{ 1|items }}", "chat template, line 1: items: value is a number, wanted a mapping" },
    { "{{ [1].index(2) }}", "chat template, line 1: 2 is not in list" },
    { "{{ 'a'.split('') }}", "chat template, line 1: empty separator" },
    {
      "{{ 'a'.replace('', 'b') }}",
      "chat template, line 1: replace: the old text is empty, wanted some",
    },
    { "{{ 'a'.find(1) }}", "chat template, line 1: a text to find is a number, wanted a string" },
    { "{% for x in none %}{% endfor %}", "chat template, line 1: 'none' object is not iterable" },
    { "{% set a, b = [1] %}", "chat template, line 1: cannot unpack a list into 2 names" },
    {
      "{% set d.x = 1 %}",
      "chat template, line 1: cannot set an attribute of 'd', which is no namespace",
    },
    { "{{ range|tojson }}", "Object of type function is not JSON serializable" },
  }

  it("says what is wrong and in which line", function()
    for _, case in ipairs(refused) do
      local ok, message = pcall(function()
        return template.compile(case[1]):render(variables)
      end)
      assert.is_false(ok, case[1])
      assert.equal(case[2], message)
    end
  end)

  it("refuses JSON that is none", function()
    for _, text in ipairs({ "", "{", "[1,]", '{"a" 1}', "nul" }) do
      assert.has_error(function()
        pyvalue.decode(text)
      end)
    end
  end)

  it("reads or refuses every beginning of a real template", function()
    local path = helper.golden_folder("tokenizers") .. "/qwen3/tokenizer_config.json"
    local source = pyvalue.decode(helper.read(path)).chat_template
    for n = 0, #source, 5 do
      local ok, message = pcall(template.compile, source:sub(1, n))
      assert.is_true(ok or message:find("^chat template, line %d+: ") ~= nil, message)
    end
  end)
end)
